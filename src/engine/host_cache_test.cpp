#include "engine/host_cache.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "base/testing/temp_folder.hpp"
#include "device/testing/lazy_host_link.hpp"
#include "device/testing/test_runtime.hpp"
#include "nn/init_model.hpp"

namespace prl::engine {
namespace {

constexpr std::int64_t kNumBlocks = 6, kBlockSize = 16;

class HostCacheTest : public ::testing::Test {
 protected:
  HostCacheTest()
      : runtime_(make_test_runtime()),
        config_(nn::make_model_config({.family = "qwen3",
                                       .vocab_size = 64,
                                       .hidden_size = 64,
                                       .intermediate_size = 96,
                                       .num_layers = 3,
                                       .num_heads = 4,
                                       .num_kv_heads = 2,
                                       .head_dim = 16,
                                       .max_position = 512,
                                       .tie_word_embeddings = true})),
        cache_(runtime_, config_, DType::kBF16, kNumBlocks, kBlockSize) {
    for (std::int64_t block = 0; block < kNumBlocks; ++block) fill(block, static_cast<char>('A' + block));
  }
  std::size_t piece_bytes() const {
    return nn::KvCache::bytes_per_block(config_, DType::kBF16, kBlockSize) / static_cast<std::size_t>(2 * config_.num_layers);
  }
  template <class F>
  void for_each_piece(std::int64_t block, F&& visit) {
    char mark = 0;  // another in each tensor
    for (std::int64_t i = 0; i < config_.num_layers; ++i) {
      const ops::KvLayer layer = cache_.layer(i);
      for (const TensorView& tensor : {layer.k, layer.v})
        visit(static_cast<char*>(tensor.data) + static_cast<std::size_t>(block) * piece_bytes(), mark++);
    }
  }
  void fill(std::int64_t block, char value) {
    for_each_piece(block, [&](char* piece, char mark) {
      const std::vector<char> bytes(piece_bytes(), static_cast<char>(value + 16 * mark));
      runtime_->copy_from_host(piece, bytes.data(), bytes.size());
    });
  }
  /// What fill() gave the block; 0 if that differs from one byte to the next.
  char value_of(std::int64_t block) {
    std::vector<char> values;
    for_each_piece(block, [&](char* piece, char mark) {
      std::vector<char> bytes(piece_bytes());
      runtime_->copy_to_host(bytes.data(), piece, bytes.size());
      for (const char byte : bytes) values.push_back(static_cast<char>(byte - 16 * mark));
    });
    for (const char value : values)
      if (value != values[0]) return 0;
    return values[0];
  }

  std::shared_ptr<DeviceRuntime> runtime_;
  nn::ModelConfig config_;
  nn::KvCache cache_;
};

BlockCopy copy_of(std::int32_t device, std::int32_t host) { return {BlockId{device}, BlockId{host}}; }

TEST_F(HostCacheTest, BlocksComeBackAsTheyWere) {
  HostCache host(make_host_link(runtime_, /*page_locked=*/true), cache_, config_.num_layers, 3);
  host.carry_out({.saves = {copy_of(0, 2), copy_of(5, 0)}, .restores = {}});
  fill(0, 'x');
  fill(5, 'y');
  host.carry_out({.saves = {copy_of(3, 1)}, .restores = {copy_of(1, 2), copy_of(3, 0)}});
  EXPECT_EQ(value_of(1), 'A');
  EXPECT_EQ(value_of(3), 'F') << "saved, then written to";
  EXPECT_EQ(value_of(0), 'x');
  host.carry_out({.saves = {}, .restores = {copy_of(0, 1)}});
  EXPECT_EQ(value_of(0), 'D');
  EXPECT_EQ(value_of(2), 'C');
  EXPECT_EQ(value_of(4), 'E');
}

TEST_F(HostCacheTest, ABlockMayBeSavedAndRestoredByOneStep) {
  HostCache host(make_host_link(runtime_, true), cache_, config_.num_layers, 1);
  host.carry_out({.saves = {copy_of(0, 0)}, .restores = {copy_of(4, 0)}});
  EXPECT_EQ(value_of(4), 'A');
}

/// Copies run when they are waited for. As on a GPU, work that is held does not hold up the host.
class UnhurriedLink final : public HostLink {
 public:
  using HostLink::to_device, HostLink::to_host;
  std::shared_ptr<void> allocate(std::size_t bytes) override {
    auto memory = std::make_shared<std::vector<std::byte>>(bytes);
    return {memory, memory->data()};
  }
  Ticket to_host(void* host, const void* source, std::size_t bytes) override { return add({host, source, bytes}); }
  Ticket to_device(void* destination, const void* host, std::size_t bytes, Ticket) override { return add({destination, host, bytes}); }
  void hold_work(Ticket) override {}
  void wait(Ticket ticket) override {
    for (; num_done_ < ticket; ++num_done_) std::memcpy(copies_[num_done_].to, copies_[num_done_].from, copies_[num_done_].bytes);
  }

 private:
  Ticket add(HostCopy copy) {
    copies_.push_back(copy);
    return copies_.size();
  }
  std::vector<HostCopy> copies_;
  std::size_t num_done_ = 0;
};

std::vector<DiskRead> read_blocks(HostCache& host, const std::vector<DiskCopy>& copies) { return host.read(copies); }

TEST_F(HostCacheTest, FilesGetAndGiveBlocksWhenTheirCopiesAreDone) {
  if (tests_gpu()) GTEST_SKIP() << "copies by the host";
  const prl::testing::TempFolder folder;
  HostCache host(std::make_shared<UnhurriedLink>(), cache_, config_.num_layers, 2);
  EXPECT_FALSE(host.has_files());
  host.open_files({.folder = folder.path(), .num_slots = 4, .read_timeout = std::chrono::seconds(60)});
  ASSERT_TRUE(host.has_files());
  host.carry_out({.saves = {copy_of(0, 0), copy_of(1, 1)}, .restores = {}});
  EXPECT_TRUE(host.write({BlockId{0}, BlockId{3}})) << "the copy to host memory is under way";
  host.carry_out({.saves = {}, .restores = {copy_of(4, 0)}});
  EXPECT_TRUE(host.write({BlockId{1}, BlockId{2}}));
  EXPECT_THAT(read_blocks(host, {{BlockId{0}, BlockId{2}}}), ::testing::ElementsAre(DiskRead::kRead))
      << "the copy from host memory is under way";
  EXPECT_EQ(value_of(4), 'A');
  host.carry_out({.saves = {}, .restores = {copy_of(5, 0)}});
  EXPECT_THAT(read_blocks(host, {{BlockId{1}, BlockId{3}}, {BlockId{0}, BlockId{1}}}),
              ::testing::ElementsAre(DiskRead::kRead, DiskRead::kGone));
  host.carry_out({.saves = {}, .restores = {copy_of(2, 1)}});
  EXPECT_THAT(read_blocks(host, {{BlockId{1}, BlockId{3}}}), ::testing::ElementsAre(DiskRead::kRead));
  EXPECT_EQ(value_of(5), 'B');
  EXPECT_EQ(value_of(2), 'A');
}

TEST_F(HostCacheTest, WorkThatFollowsWaitsForAllCopies) {
  if (tests_gpu()) GTEST_SKIP() << "copies by the host";
  const auto link = std::make_shared<LazyHostLink>(runtime_);
  HostCache host(link, cache_, config_.num_layers, 2);
  host.carry_out({.saves = {copy_of(0, 0), copy_of(1, 1)}, .restores = {copy_of(1, 0)}});
  EXPECT_EQ(link->num_pending(), 0u);
  EXPECT_EQ(value_of(1), 'A');
  host.carry_out({.saves = {}, .restores = {copy_of(0, 1)}});
  EXPECT_EQ(value_of(0), 'B');
  const std::size_t num_copies = link->num_copies();
  host.carry_out({});
  EXPECT_EQ(link->num_copies(), num_copies);
}

TEST_F(HostCacheTest, MoreThanTheHostHasIsRefusedByTheKey) {
  try {
    HostCache host(make_host_link(runtime_, true), cache_, config_.num_layers, std::int64_t{1} << 40);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("kv_cache_offload.cpu.num_bytes"));
  }
}

}  // namespace
}  // namespace prl::engine
