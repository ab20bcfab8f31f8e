#include "comm/nccl/nccl_api.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include "comm/communicator.hpp"

namespace prl::comm {

namespace {

/// The first of `names` that can be loaded. It stays loaded: its threads may outlive whoever asked.
void* load(std::initializer_list<const char*> names, std::string& missing) {
  for (const char* name : names)
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  const char* reason = ::dlerror();
  missing = reason != nullptr ? reason : "unknown";
  return nullptr;
}

template <typename Function>
void find(void* library, const char* name, Function*& function, std::string& missing) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = fmt::format("{} is not in the library", name);
}

NcclApi load_api() {
  NcclApi api;
  std::string reason;
  void* nccl = load({"libnccl.so.2", "libnccl.so"}, reason);
  if (nccl == nullptr) {
    api.missing = fmt::format("NCCL was not found ({}): install it, or name the folder of libnccl.so.2 in LD_LIBRARY_PATH", reason);
    return api;
  }
  find(nccl, "ncclGetVersion", api.get_version, api.missing);
  if (api.missing.empty() && (api.get_version(&api.version) != kNcclSuccess || api.version < NcclApi::kOldest))
    api.missing = fmt::format("NCCL {} is too old, 2.18 is the oldest that works", api.version_text());
  find(nccl, "ncclGetUniqueId", api.get_unique_id, api.missing);
  find(nccl, "ncclCommInitRankConfig", api.comm_init_rank_config, api.missing);
  find(nccl, "ncclCommGetAsyncError", api.comm_get_async_error, api.missing);
  find(nccl, "ncclCommFinalize", api.comm_finalize, api.missing);
  find(nccl, "ncclCommDestroy", api.comm_destroy, api.missing);
  find(nccl, "ncclCommAbort", api.comm_abort, api.missing);
  find(nccl, "ncclGetErrorString", api.get_error_string, api.missing);
  find(nccl, "ncclGetLastError", api.get_last_error, api.missing);
  find(nccl, "ncclGroupStart", api.group_start, api.missing);
  find(nccl, "ncclGroupEnd", api.group_end, api.missing);
  find(nccl, "ncclSend", api.send, api.missing);
  find(nccl, "ncclRecv", api.recv, api.missing);
  find(nccl, "ncclBroadcast", api.broadcast, api.missing);
  find(nccl, "ncclReduce", api.reduce, api.missing);
  find(nccl, "ncclAllGather", api.all_gather, api.missing);
  find(nccl, "ncclAllReduce", api.all_reduce, api.missing);
  find(nccl, "ncclReduceScatter", api.reduce_scatter, api.missing);
  if (!api.missing.empty()) return api;
  void* driver = load({"libcuda.so.1"}, reason);
  if (driver == nullptr) {
    api.missing = fmt::format("no NVIDIA driver ({})", reason);
    return api;
  }
  int (*init)(unsigned) = nullptr;
  find(driver, "cuInit", init, api.missing);
  find(driver, "cuDevicePrimaryCtxRetain", api.primary_context_retain, api.missing);
  find(driver, "cuCtxSetCurrent", api.context_set_current, api.missing);
  find(driver, "cuStreamQuery", api.stream_query, api.missing);
  find(driver, "cuCtxGetStreamPriorityRange", api.stream_priority_range, api.missing);
  find(driver, "cuStreamCreateWithPriority", api.stream_create, api.missing);
  find(driver, "cuStreamDestroy_v2", api.stream_destroy, api.missing);
  find(driver, "cuStreamWaitEvent", api.stream_wait_event, api.missing);
  find(driver, "cuEventCreate", api.event_create, api.missing);
  find(driver, "cuEventDestroy_v2", api.event_destroy, api.missing);
  find(driver, "cuEventRecord", api.event_record, api.missing);
  find(driver, "cuEventQuery", api.event_query, api.missing);
  if (api.missing.empty() && init(0) != 0) api.missing = "the NVIDIA driver finds no GPU";
  return api;
}

}  // namespace

std::string NcclApi::version_text() const { return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100); }

const NcclApi& NcclApi::get() {
  static const NcclApi api = load_api();
  return api;
}

std::string missing_nccl(std::string* version) {
  const NcclApi& api = NcclApi::get();
  if (version != nullptr && api.version > 0) *version = api.version_text();
  return api.missing;
}

}  // namespace prl::comm
