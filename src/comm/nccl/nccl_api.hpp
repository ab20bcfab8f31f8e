#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

namespace prl::comm {

// The part of NCCL's C interface that is used, declared here so that no header of it is needed to build. Values are those of nccl.h 2.18
// and later, which keep their meaning across versions.
struct NcclComm;
struct NcclUniqueId {
  char bytes[128];
};
/// The members of 2.18; newer libraries read `size` and `version` and take defaults for what they added.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeefu;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};
inline constexpr int kNcclSuccess = 0, kNcclSystemError = 2, kNcclInProgress = 7;
enum class NcclType : int { kUint8 = 1, kInt32 = 2, kInt64 = 4, kFloat32 = 7, kBfloat16 = 9 };
enum class NcclOp : int { kSum = 0, kMax = 2 };

/// libnccl.so.2 and libcuda.so.1, loaded when first asked for and kept.
struct NcclApi {
  /// Null members if `missing` is not empty.
  static const NcclApi& get();

  std::string missing;  ///< what was not found, and where it comes from
  int version = 0;      ///< 22803 for 2.28.3
  std::string version_text() const;
  /// Since 2.18 a communicator can be made without blocking, and later calls of NcclConfig are understood.
  static constexpr int kOldest = 21800;

  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(NcclUniqueId*) = nullptr;
  int (*comm_init_rank_config)(NcclComm**, int, NcclUniqueId, int, NcclConfig*) = nullptr;
  int (*comm_get_async_error)(NcclComm*, int*) = nullptr;
  int (*comm_finalize)(NcclComm*) = nullptr;
  int (*comm_destroy)(NcclComm*) = nullptr;
  int (*comm_abort)(NcclComm*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  const char* (*get_last_error)(NcclComm*) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void*, std::size_t, NcclType, int, NcclComm*, void*) = nullptr;
  int (*recv)(void*, std::size_t, NcclType, int, NcclComm*, void*) = nullptr;
  int (*broadcast)(const void*, void*, std::size_t, NcclType, int, NcclComm*, void*) = nullptr;
  int (*reduce)(const void*, void*, std::size_t, NcclType, NcclOp, int, NcclComm*, void*) = nullptr;
  int (*all_gather)(const void*, void*, std::size_t, NcclType, NcclComm*, void*) = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, void*) = nullptr;
  int (*reduce_scatter)(const void*, void*, std::size_t, NcclType, NcclOp, NcclComm*, void*) = nullptr;
  // The driver: the context that the runtime's stream belongs to, whether the stream has run dry, and a stream beside it with the events
  // that order the two.
  int (*primary_context_retain)(void**, int) = nullptr;
  int (*context_set_current)(void*) = nullptr;
  int (*stream_query)(void*) = nullptr;
  int (*stream_priority_range)(int* least, int* greatest) = nullptr;
  int (*stream_create)(void**, unsigned flags, int priority) = nullptr;
  int (*stream_destroy)(void*) = nullptr;
  int (*stream_wait_event)(void* stream, void* event, unsigned flags) = nullptr;
  int (*event_create)(void**, unsigned flags) = nullptr;
  int (*event_destroy)(void*) = nullptr;
  int (*event_record)(void* event, void* stream) = nullptr;
  int (*event_query)(void*) = nullptr;
};

}  // namespace prl::comm
