#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "ops/context.hpp"

namespace prl::ops {

/// Devices of this process that share the layers of a model: each computes some of the outputs of every product, and all of them need the
/// whole rows for the next one.
///
/// Threads    each rank has one thread; all of them call gather() equally often, with parts of the same shape. abort() from any.
/// Numerics   values are moved and never added: a row has the bits that one device computes.
class ShardGroup {
 public:
  virtual ~ShardGroup() = default;
  virtual int size() const noexcept = 0;
  /// [T, size * n], of which columns [r * n, (r + 1) * n) are rank r's `part_Tn`; rows of a multiple of 16 bytes. On an asynchronous
  /// device it is enqueued. The memory is the group's: valid for work that is enqueued before the rank's next call.
  /// Error{kOutOfMemory} if it is more than the group was made for; {kUnavailable} if another rank does not come, after a deadline, or
  /// after abort().
  virtual TensorView gather(OpContext& ctx, int rank, ConstTensorView part_Tn) = 0;
  /// Around recorded work that holds gathers, before it is enqueued and after: until the threads of all ranks are here. A thread that waits
  /// for one device in the driver may keep others from enqueuing what that device waits for. Errors as of gather(), which does so itself.
  virtual void meet(int rank) = 0;
  /// A rank has failed and will not come: those that wait for it fail too, at once on the CPU and after the deadline on GPUs.
  virtual void abort() noexcept = 0;
  /// After abort(), once all ranks have returned: the group works again.
  virtual void reset() = 0;
};

/// One rank's end of a group; without a group a device computes whole layers.
struct SharedLayers {
  ShardGroup* group = nullptr;  ///< borrowed
  int rank = 0;
};

/// For devices of one kind, one runtime for each rank; GPUs must reach each other's memory. `max_bytes`: of the largest gathered tensor,
/// of which each device holds two. Error{kUnavailable} naming two GPUs that do not reach each other, {kOutOfMemory}.
std::unique_ptr<ShardGroup> make_shard_group(std::span<const std::shared_ptr<DeviceRuntime>> devices, std::size_t max_bytes);

}  // namespace prl::ops
