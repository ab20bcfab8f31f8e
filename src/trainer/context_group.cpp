#include "trainer/context_group.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "base/error.hpp"

namespace prl::trainer {

namespace {

std::unique_ptr<comm::Communicator> neighbours(comm::Communicator& world, int size) {
  PRL_CHECK(world.size() % size == 0, "groups of {} among {} ranks", size, world.size());
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), world.rank() / size * size);
  return world.subgroup(members, fmt::format("{}/context{}", world.options().group, members.front()), world.generation());
}

}  // namespace

ContextGroup::ContextGroup(comm::Communicator& world, int size) : first_(world.rank() / size * size), group_(neighbours(world, size)) {}

template <typename Work>
void ContextGroup::work(const Work& what) {
  try {
    what();
  } catch (const comm::PeerLost& lost) {
    std::vector<int> of_all;
    for (const int rank : lost.ranks()) of_all.push_back(first_ + rank);
    throw comm::PeerLost(of_all,
                         fmt::format("{} (among those that share a row; among all ranks: {})", lost.what(), fmt::join(of_all, ", ")),
                         lost.gave_up());
  }
}

void ContextGroup::give_up_on(const comm::PeerLost& lost) noexcept {
  std::vector<int> of_group;
  for (const int rank : lost.ranks())
    if (rank >= first_ && rank < first_ + size()) of_group.push_back(rank - first_);
  group_->give_up_on(comm::PeerLost(of_group, lost.what(), lost.gave_up()));
}

void ContextGroup::all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins) {
  work([&] { group_->all_to_all(outs, ins, {.what = "heads of attention"}); });
}

std::vector<float> ContextGroup::gather(std::span<const float> mine) {
  std::vector<float> all;
  work([&] {
    const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size_bytes());
    for (const std::string& part : group_->gather_bytes(bytes, {.what = "log-probabilities of a row"})) {
      PRL_CHECK(part.size() == bytes.size(), "a part of {} bytes of a row, {} wanted", part.size(), bytes.size());
      const auto* values = reinterpret_cast<const float*>(part.data());
      all.insert(all.end(), values, values + mine.size());
    }
  });
  return all;
}

void check_row_cut(const nn::ModelConfig& model, const RowCut& cut) {
  const auto is_power = [](int n) { return n > 0 && (n & (n - 1)) == 0; };
  if (!is_power(cut.num_ranks) || !is_power(cut.num_leaves) || cut.num_leaves % cut.num_ranks != 0)
    fail(ErrorCode::kInvalidArgument,
         "model.leaves_per_row: {} leaves cannot be divided among model.cp = {} devices; both are powers of two", cut.num_leaves,
         cut.num_ranks);
  if (cut.num_ranks > 1 && !model.linear.layers.empty())
    fail(ErrorCode::kNotImplemented, "model.cp: {} devices cannot share the rows of a {} model: some of its layers have linear attention",
         cut.num_ranks, model.model_type);
  if (model.num_heads % cut.num_ranks != 0 || model.num_kv_heads % cut.num_ranks != 0)
    fail(ErrorCode::kInvalidArgument,
         "model.cp: {} devices cannot share the {} query heads and {} key-value heads of this model; use a divisor of both", cut.num_ranks,
         model.num_heads, model.num_kv_heads);
}

int fitting_context(const RowCut& cut, int num_ranks) noexcept {
  int size = cut.num_ranks;
  while (num_ranks % size != 0) size /= 2;
  return size;
}

}  // namespace prl::trainer
