// What every backend must do, for every number of ranks. The same bodies run over local, threads, gloo and nccl.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/testing/eventually.hpp"
#include "comm/mesh.hpp"
#include "comm/testing/ranks.hpp"

namespace prl::comm {
namespace {

using testing::run_threads;

struct Backend {
  std::string name;
  int size;
};
std::ostream& operator<<(std::ostream& out, const Backend& b) { return out << b.name << b.size; }

class Conformance : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    const std::string reason = testing::reason_to_skip(GetParam().name, GetParam().size);
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  void run(const std::function<void(Communicator&)>& body) { run_threads(GetParam().name, GetParam().size, body); }
};

/// Values whose sum depends on the order in which they are added.
float value_of(int rank, std::int64_t i) {
  const auto h = static_cast<std::uint32_t>(rank * 7919 + i * 104729 + 17) * 2654435761u;
  return (static_cast<float>(h >> 8) / 16777216.0f - 0.5f) * static_cast<float>(1 << (h % 12));
}

/// A tensor where the backend computes: on the rank's GPU, else in host memory. Numbers are written and read as fp32.
class Numbers {
 public:
  Numbers(Communicator& group, std::int64_t n, DType dtype, bool on_host = false)
      : runtime_(group.options().runtime != nullptr && !on_host ? group.options().runtime : make_cpu_runtime()),
        tensor_(Tensor::zeros(runtime_, {n}, dtype)) {}
  Numbers(Communicator& group, const std::vector<float>& values, DType dtype, bool on_host = false)
      : Numbers(group, static_cast<std::int64_t>(values.size()), dtype, on_host) {
    write(values);
  }
  void write(const std::vector<float>& values) const {
    std::vector<char> bytes(tensor_.num_bytes());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (tensor_.dtype() == DType::kF32) {
        std::memcpy(bytes.data() + i * 4, &values[i], 4);
      } else {
        const BFloat16 rounded = to_bf16(values[i]);
        std::memcpy(bytes.data() + i * 2, &rounded, 2);
      }
    }
    if (!bytes.empty()) runtime_->copy_from_host(tensor_.data(), bytes.data(), bytes.size());
  }
  TensorView view() const { return tensor_.view(); }
  TensorView part(std::int64_t begin, std::int64_t count) const { return tensor_.slice(begin, count).view(); }
  std::vector<float> read() const {
    std::vector<char> bytes(tensor_.num_bytes());
    if (!bytes.empty()) runtime_->copy_to_host(bytes.data(), tensor_.data(), bytes.size());
    std::vector<float> values(static_cast<std::size_t>(tensor_.num_elements()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (tensor_.dtype() == DType::kF32) {
        std::memcpy(&values[i], bytes.data() + i * 4, 4);
      } else {
        BFloat16 rounded;
        std::memcpy(&rounded, bytes.data() + i * 2, 2);
        values[i] = to_f32(rounded);
      }
    }
    return values;
  }

 private:
  std::shared_ptr<DeviceRuntime> runtime_;
  Tensor tensor_;
};

float rounded(float x, DType dtype) { return dtype == DType::kBF16 ? to_f32(to_bf16(x)) : x; }

std::vector<float> values_of(int rank, std::int64_t begin, std::int64_t count, DType dtype) {
  std::vector<float> values;
  for (std::int64_t i = begin; i < begin + count; ++i) values.push_back(rounded(value_of(rank, i), dtype));
  return values;
}

/// Sums in the order of ranks, equal bit for bit unless the backend sums in an order of its own.
void expect_sums(const Communicator& group, const std::vector<float>& found, std::int64_t begin, DType dtype) {
  for (std::size_t k = 0; k < found.size(); ++k) {
    const std::int64_t i = begin + static_cast<std::int64_t>(k);
    float sum = rounded(value_of(0, i), dtype), size = std::abs(sum);
    for (int r = 1; r < group.size(); ++r) {
      sum += rounded(value_of(r, i), dtype);
      size += std::abs(value_of(r, i));
    }
    if (group.backend() == "nccl")
      ASSERT_NEAR(found[k], sum, size * (dtype == DType::kBF16 ? 0.02f : 1e-5f)) << "element " << i;
    else
      ASSERT_EQ(std::bit_cast<std::uint32_t>(found[k]), std::bit_cast<std::uint32_t>(rounded(sum, dtype))) << "element " << i;
  }
}

constexpr DType kDtypes[] = {DType::kF32, DType::kBF16};
constexpr std::int64_t kSizes[] = {0, 1, 3, 17, 1000, 70'001};

TEST_P(Conformance, AllToAllOfEqualParts) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes)
      for (const std::int64_t n : kSizes) {
        std::vector<float> mine;
        for (int to = 0; to < group.size(); ++to)
          for (const float x : values_of(group.rank(), to * n, n, dtype)) mine.push_back(x);
        const Numbers in(group, mine, dtype), out(group, n * group.size(), dtype);
        group.all_to_all(out.view(), in.view(), {.what = "parts"});
        const std::vector<float> found = out.read();
        for (int from = 0; from < group.size(); ++from) {
          const std::vector<float> wanted = values_of(from, group.rank() * n, n, dtype);
          ASSERT_TRUE(std::equal(wanted.begin(), wanted.end(), found.begin() + from * n)) << n << " from " << from;
        }
      }
  });
}

/// Elements that `from` sends to `to`: some pairs send nothing.
std::int64_t ragged(int from, int to) { return (from * 5 + to * 3) % 4 * 37 + (from == to ? 1 : 0); }

TEST_P(Conformance, AllToAllOfUnequalParts) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes) {
      std::vector<std::int64_t> in_counts, out_counts;
      std::vector<float> mine, wanted;
      for (int r = 0; r < group.size(); ++r) {
        in_counts.push_back(ragged(group.rank(), r));
        out_counts.push_back(ragged(r, group.rank()));
        for (const float x : values_of(group.rank(), r * 1000, in_counts.back(), dtype)) mine.push_back(x);
        for (const float x : values_of(r, group.rank() * 1000, out_counts.back(), dtype)) wanted.push_back(x);
      }
      const Numbers in(group, mine, dtype), out(group, static_cast<std::int64_t>(wanted.size()), dtype);
      group.all_to_all(out.view(), out_counts, in.view(), in_counts);
      ASSERT_EQ(out.read(), wanted);
    }
  });
}

// Two places take turns: while one is on its way the caller fills the other, and a place is filled again once it was joined.
TEST_P(Conformance, AStartedAllToAllRunsBesideTheCallersWork) {
  run([](Communicator& group) {
    constexpr std::int64_t kCount = 200'001;
    std::vector<Numbers> places, arrivals;
    for (int i = 0; i < 2; ++i) places.emplace_back(group, kCount, DType::kF32);
    for (int i = 0; i < group.size(); ++i) arrivals.emplace_back(group, kCount, DType::kF32);
    std::vector<TensorView> outs;
    for (const Numbers& arrival : arrivals) outs.push_back(arrival.view());
    std::unique_ptr<Started> started;
    const auto expect_arrival = [&](int round) {
      started->join();
      started.reset();
      for (int r = 0; r < group.size(); ++r)
        ASSERT_EQ(arrivals[static_cast<std::size_t>(r)].read(), values_of(r, round, kCount, DType::kF32)) << round << " from " << r;
    };
    for (int round = 0; round < 5; ++round) {
      const Numbers& place = places[static_cast<std::size_t>(round % 2)];
      place.write(values_of(group.rank(), round, kCount, DType::kF32));
      if (round > 0) expect_arrival(round - 1);
      started = group.start_all_to_all(outs, std::vector<ConstTensorView>(outs.size(), place.view()), {.what = "a round"});
    }
    expect_arrival(4);
    (void)group.start_all_to_all(outs, std::vector<ConstTensorView>(outs.size(), places[0].view()));  // waits, and forgets it
    group.barrier();
  });
}

// Three at once, which run one after the other beside the caller's work; the last is not joined. Inputs are parts of the outputs.
TEST_P(Conformance, StartedGathersAreJoinedOneByOne) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes)
      for (const std::int64_t unevenness : {0, 1000}) {
        std::vector<std::int64_t> counts;
        std::int64_t total = 0, begin = 0;
        for (int r = 0; r < group.size(); ++r) {
          if (r == group.rank()) begin = total;
          counts.push_back(unevenness == 0 ? 70'001 : r == 1 ? 0 : 70'001 + r * unevenness);
          total += counts.back();
        }
        std::vector<Numbers> gathered;
        std::vector<std::unique_ptr<Started>> started;
        for (int i = 0; i < 3; ++i) {
          const std::vector<float> own = values_of(group.rank(), i, counts[static_cast<std::size_t>(group.rank())], dtype);
          std::vector<float> before(static_cast<std::size_t>(total), -1.0f);
          std::ranges::copy(own, before.begin() + begin);
          const Numbers& out = gathered.emplace_back(group, before, dtype);
          started.push_back(group.start_all_gather(out.view(), counts, out.part(begin, static_cast<std::int64_t>(own.size())),
                                                   {.what = "a section of the weights"}));
        }
        for (int i = 0; i < 2; ++i) {
          started[static_cast<std::size_t>(i)]->join();
          std::vector<float> wanted;
          for (int r = 0; r < group.size(); ++r)
            for (const float x : values_of(r, i, counts[static_cast<std::size_t>(r)], dtype)) wanted.push_back(x);
          ASSERT_EQ(gathered[static_cast<std::size_t>(i)].read(), wanted) << i;
        }
        started.clear();
        group.barrier();
      }
  });
}

TEST_P(Conformance, AllGather) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes)
      for (const std::int64_t n : kSizes) {
        const Numbers in(group, values_of(group.rank(), 5, n, dtype), dtype), out(group, n * group.size(), dtype);
        group.all_gather(out.view(), in.view());
        std::vector<float> wanted;
        for (int r = 0; r < group.size(); ++r)
          for (const float x : values_of(r, 5, n, dtype)) wanted.push_back(x);
        ASSERT_EQ(out.read(), wanted);
      }
  });
}

TEST_P(Conformance, AllGatherOfUnequalPartsInPlace) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes) {
      std::vector<std::int64_t> counts;
      std::vector<float> wanted, mine;
      std::int64_t begin = 0;
      for (int r = 0; r < group.size(); ++r) {
        counts.push_back(r % 3 == 1 ? 0 : 11 * r + 2);
        const std::vector<float> part = values_of(r, 0, counts.back(), dtype);
        if (r < group.rank()) begin += counts.back();
        wanted.insert(wanted.end(), part.begin(), part.end());
        mine.insert(mine.end(), part.size(), 0.0f);
        if (r == group.rank()) std::copy(part.begin(), part.end(), mine.end() - static_cast<std::ptrdiff_t>(part.size()));
      }
      const Numbers all(group, mine, dtype);
      group.all_gather(all.view(), counts, all.part(begin, counts[static_cast<std::size_t>(group.rank())]));
      ASSERT_EQ(all.read(), wanted);
    }
  });
}

TEST_P(Conformance, BroadcastFromEveryRoot) {
  run([](Communicator& group) {
    for (int root = 0; root < group.size(); ++root)
      for (const std::int64_t n : kSizes) {
        const Numbers data(group, values_of(group.rank(), 3, n, DType::kF32), DType::kF32);
        group.broadcast(data.view(), root);
        ASSERT_EQ(data.read(), values_of(root, 3, n, DType::kF32));
      }
  });
}

TEST_P(Conformance, ReduceScatter) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes)
      for (const std::int64_t n : kSizes) {
        const Numbers in(group, values_of(group.rank(), 0, n * group.size(), dtype), dtype), out(group, n, dtype);
        group.reduce_scatter(out.view(), in.view());
        expect_sums(group, out.read(), group.rank() * n, dtype);
      }
    std::vector<std::int64_t> counts;
    for (int r = 0; r < group.size(); ++r) counts.push_back(r % 2 == 0 ? 100 + r : 0);
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    const std::int64_t begin = std::accumulate(counts.begin(), counts.begin() + group.rank(), std::int64_t{0});
    const Numbers in(group, values_of(group.rank(), 0, total, DType::kF32), DType::kF32),
        out(group, counts[static_cast<std::size_t>(group.rank())], DType::kF32);
    group.reduce_scatter(out.view(), in.view(), counts);
    expect_sums(group, out.read(), begin, DType::kF32);
  });
}

TEST_P(Conformance, AllReduce) {
  run([](Communicator& group) {
    for (const DType dtype : kDtypes)
      for (const std::int64_t n : kSizes) {
        const Numbers data(group, values_of(group.rank(), 0, n, dtype), dtype);
        group.all_reduce(data.view());
        expect_sums(group, data.read(), 0, dtype);
        const Numbers largest(group, values_of(group.rank(), 0, n, dtype), dtype);
        group.all_reduce(largest.view(), ReduceOp::kMax);
        const std::vector<float> found = largest.read();
        for (std::size_t i = 0; i < found.size(); ++i) {
          float wanted = -1e30f;
          for (int r = 0; r < group.size(); ++r) wanted = std::max(wanted, rounded(value_of(r, static_cast<std::int64_t>(i)), dtype));
          ASSERT_EQ(found[i], wanted);
        }
      }
    std::int64_t count = group.rank() + 1;
    group.all_reduce(TensorView{&count, {1}, DType::kI64, {}, 1});
    ASSERT_EQ(count, group.size() * (group.size() + 1) / 2);
  });
}

TEST_P(Conformance, SendAndReceiveKeepTheirOrder) {
  run([](Communicator& group) {
    if (group.size() == 1) {
      float x = 0;
      EXPECT_THROW(group.send(TensorView{&x, {1}, DType::kF32, {}, 1}, 0), Error);
      return;
    }
    // Pairs of an even and the next odd rank, so that no backend needs a send to return before it is received.
    const bool is_even = group.rank() % 2 == 0;
    const int peer = is_even ? group.rank() + 1 : group.rank() - 1;
    for (const std::int64_t n : kSizes) {
      if (peer >= group.size()) break;
      for (const bool sends : {is_even, !is_even}) {
        if (sends) {
          group.send(Numbers(group, values_of(group.rank(), 1, n, DType::kF32), DType::kF32).view(), peer);
          group.settle();
        } else {
          const Numbers got(group, n, DType::kF32);
          group.recv(got.view(), peer);
          ASSERT_EQ(got.read(), values_of(peer, 1, n, DType::kF32));
        }
      }
    }
    group.barrier();
  });
}

TEST_P(Conformance, HostTensorsAndSmallThings) {
  run([](Communicator& group) {
    const Numbers data(group, values_of(group.rank(), 0, 33, DType::kF32), DType::kF32, /*on_host=*/true);
    group.all_reduce(data.view());
    expect_sums(group, data.read(), 0, DType::kF32);
    const std::vector<double> numbers = group.gather_number(group.rank() * 0.5);
    for (int r = 0; r < group.size(); ++r) ASSERT_EQ(numbers[static_cast<std::size_t>(r)], r * 0.5);
    const std::vector<std::string> texts = group.gather_bytes(std::string(static_cast<std::size_t>(group.rank()) * 3, 'x'));
    for (int r = 0; r < group.size(); ++r) ASSERT_EQ(texts[static_cast<std::size_t>(r)].size(), static_cast<std::size_t>(r) * 3);
    group.barrier({.what = "the end"});
  });
}

TEST_P(Conformance, WrongArgumentsAreNamedBeforeAnythingIsSent) {
  run([](Communicator& group) {
    float x[4] = {};
    const TensorView view{x, {4}, DType::kF32, {}, 4};
    const auto code_of = [](auto call) {
      try {
        call();
      } catch (const Error& error) {
        return error.code();
      }
      return ErrorCode::kInternal;
    };
    std::vector<std::int64_t> counts(static_cast<std::size_t>(group.size()), 0);
    EXPECT_EQ(code_of([&] { group.broadcast(view, group.size()); }), ErrorCode::kInvalidArgument);
    EXPECT_EQ(code_of([&] { group.all_gather(view, counts, view); }), ErrorCode::kShape);
    counts.push_back(4);
    EXPECT_EQ(code_of([&] { group.all_to_all(view, counts, view, counts); }), ErrorCode::kShape);
    EXPECT_EQ(code_of([&] { group.all_reduce(TensorView{x, {4}, DType::kF16, {}, 4}); }), ErrorCode::kShape);
    group.barrier();  // the group is whole
  });
}

TEST_P(Conformance, SubgroupsAndMeshes) {
  run([](Communicator& group) {
    std::vector<int> members;
    for (int r = group.size() - 1; r >= 0; --r)
      if (r % 2 == group.rank() % 2) members.push_back(r);
    const auto half = group.subgroup(members, fmt::format("half{}", group.rank() % 2), 0);
    const std::vector<double> ranks = half->gather_number(group.rank());
    ASSERT_EQ(std::vector<int>(ranks.begin(), ranks.end()), members);
    EXPECT_THROW((void)group.subgroup(std::vector<int>{(group.rank() + 1) % group.size(), -1}, "wrong", 0), Error);
  });
  if (GetParam().name == "nccl" || GetParam().size != 8) return;
  const std::shared_ptr<Store> store = make_memory_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; ++rank)
    threads.emplace_back([&, rank] {
      CommOptions options;
      options.rank = rank;
      options.size = 8;
      options.store = store;
      Mesh mesh(GetParam().name == "gloo" ? make_gloo_communicator(options) : make_threads_communicator(options), {{2, 2, 2}});
      const auto sum_along = [&](Axis axis) {
        double sum = 0;
        for (const double r : mesh.along(axis).gather_number(rank)) sum += r;
        return static_cast<int>(sum);
      };
      EXPECT_EQ(sum_along(Axis::kReplicate), rank % 4 * 2 + 4);
      EXPECT_EQ(sum_along(Axis::kShard), rank / 4 * 8 + rank % 2 * 2 + 2);
      EXPECT_EQ(sum_along(Axis::kContext), rank / 2 * 4 + 1);
      mesh.world().barrier();
    });
  for (std::thread& thread : threads) thread.join();
}

std::vector<Backend> all_backends() {
  std::vector<Backend> all{{"local", 1}};
  for (const char* name : {"threads", "gloo"})
    for (int size = 2; size <= 8; ++size) all.push_back({name, size});
  for (const int size : {1, 2, 3, 4, 8}) all.push_back({"nccl", size});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Conformance, ::testing::ValuesIn(all_backends()),
                         [](const auto& param) { return param.param.name + std::to_string(param.param.size); });

TEST(Mesh, CoordinatesAndLines) {
  const MeshShape shape{{2, 3, 4}};
  EXPECT_EQ(shape.num_ranks(), 24);
  EXPECT_EQ(shape.coordinates(23), (std::array<int, 3>{1, 2, 3}));
  EXPECT_EQ(shape.coordinates(14), (std::array<int, 3>{1, 0, 2}));
  EXPECT_EQ(shape.line(14, Axis::kReplicate), (std::vector<int>{2, 14}));
  EXPECT_EQ(shape.line(14, Axis::kShard), (std::vector<int>{14, 18, 22}));
  EXPECT_EQ(shape.line(14, Axis::kContext), (std::vector<int>{12, 13, 14, 15}));
  EXPECT_THROW(Mesh(make_local_communicator(), shape), Error);
  Mesh one = Mesh::of_one();
  EXPECT_EQ(&one.along(Axis::kShard), &one.world());
  EXPECT_EQ(one.along(Axis::kContext).size(), 1);
}

}  // namespace
}  // namespace prl::comm
