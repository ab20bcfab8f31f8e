// Copies beside the work of a real GPU.
#include "device/host_link.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "base/error.hpp"
#include "device/device.hpp"

namespace prl {
namespace {

/// Bytes that differ from round to round.
std::vector<unsigned char> pattern(std::size_t bytes, int round) {
  std::vector<unsigned char> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<unsigned char>(i * 31 + i / 977 + static_cast<std::size_t>(round) * 7);
  return out;
}

/// One device buffer is written by queued work, copied out, written again, and filled with what was copied: every wait counts, and with
/// more copies than the link has events, tickets grow old.
TEST(CudaHostLink, CopiesKeepTheirPlaceBesideQueuedWork) {
  for (const bool page_locked : {true, false}) {
    const auto runtime = make_cuda_runtime();
    const auto link = make_host_link(runtime, page_locked);
    constexpr std::size_t kSize = (std::size_t{8} << 20) + 12;
    constexpr int kRounds = 150;
    void* buffer = runtime->allocate(kSize);
    void* source = runtime->allocate(kSize);
    const std::shared_ptr<void> host = link->allocate(kSize), back = link->allocate(kSize);
    HostLink::Ticket first = 0;
    for (int round = 0; round < kRounds; ++round) {
      const auto bytes = pattern(kSize, round);
      runtime->copy_from_host(source, bytes.data(), kSize);
      runtime->copy_within(buffer, source, kSize);
      const HostLink::Ticket out = link->to_host(host.get(), buffer, kSize);
      if (round == 0) first = out;
      link->hold_work(out);
      runtime->zero(buffer, kSize);
      const HostLink::Ticket in = link->to_device(buffer, host.get(), kSize, out);
      link->hold_work(in);
      link->hold_work(first);
      const HostLink::Ticket last = link->to_host(back.get(), buffer, kSize);
      link->wait(last);
      ASSERT_EQ(std::memcmp(back.get(), bytes.data(), kSize), 0) << "round " << round << (page_locked ? "" : ", pageable");
    }
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(host.get()) % 64, 0u);
    runtime->deallocate(source, kSize);
    runtime->deallocate(buffer, kSize);
  }
}

TEST(CudaHostLink, WaitsForItsCopiesAndLeavesItsMemory) {
  const auto runtime = make_cuda_runtime();
  constexpr std::size_t kSize = std::size_t{64} << 20;
  std::shared_ptr<void> host;
  void* buffer = runtime->allocate(kSize);
  runtime->zero(buffer, kSize);
  {
    const auto link = make_host_link(runtime, true);
    host = link->allocate(kSize);
    std::memset(host.get(), 1, kSize);
    link->to_host(host.get(), buffer, kSize);
  }
  const auto* bytes = static_cast<const unsigned char*>(host.get());
  EXPECT_EQ(std::accumulate(bytes, bytes + kSize, std::uint64_t{0}), 0u);
  runtime->deallocate(buffer, kSize);
}

/// A system that ran out of memory would end the process.
TEST(CudaHostLink, SaysWhatWasWantedWhenHostMemoryEnds) {
  for (const bool page_locked : {true, false}) {
    const auto link = make_host_link(make_cuda_runtime(), page_locked);
    try {
      link->allocate(make_cpu_runtime()->bytes_available() + (std::size_t{8} << 30));
      FAIL() << "there is no such memory";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      EXPECT_NE(std::string(error.what()).find("bytes of host memory are available"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace prl
