#include "comm/testing/ranks.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <thread>

namespace prl::comm::testing {

namespace {

std::unique_ptr<Communicator> make(const std::string& backend, CommOptions options) {
  if (backend == "local") return make_local_communicator(std::move(options));
  if (backend == "threads") return make_threads_communicator(std::move(options));
  if (backend == "gloo") return make_gloo_communicator(std::move(options));
  options.runtime = make_cuda_runtime(options.rank);
  return make_nccl_communicator(std::move(options));
}

}  // namespace

std::string reason_to_skip(const std::string& backend, int size) {
  if (backend == "gloo" && !has_gloo()) return "this build has no Gloo";
  if (backend != "nccl") return {};
  const CudaDevices gpus = list_cuda_devices();
  if (static_cast<int>(gpus.devices.size()) < size)
    return fmt::format("{} GPUs are wanted, there are {}: {}", size, gpus.devices.size(), gpus.missing);
  return missing_nccl();
}

void run_threads(const std::string& backend, int size, const std::function<void(Communicator&)>& body, std::chrono::milliseconds timeout) {
  const std::shared_ptr<Store> store = make_memory_store();
  std::mutex mutex;
  std::string failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        CommOptions options;
        options.rank = rank;
        options.size = size;
        options.store = store;
        options.timeout = timeout;
        const auto group = make(backend, std::move(options));
        body(*group);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (failure.empty()) failure = fmt::format("rank {}: {}", rank, error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (!failure.empty()) throw std::runtime_error(failure);
}

Processes::Processes(int size, const std::function<int(int rank)>& body) : is_reaped_(static_cast<std::size_t>(size)) {
  std::fflush(nullptr);
  for (int rank = 0; rank < size; ++rank) {
    const int pid = ::fork();
    if (pid == 0) {
      (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
      int status = 99;
      try {
        status = body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      std::fflush(nullptr);
      ::_exit(status);
    }
    if (pid < 0) throw std::runtime_error("fork failed");
    pids_.push_back(pid);
  }
}

Processes::~Processes() {
  for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
    if (is_reaped_[rank]) continue;
    (void)::kill(pids_[rank], SIGKILL);
    (void)::waitpid(pids_[rank], nullptr, 0);
  }
}

std::optional<int> Processes::wait(int rank, std::chrono::milliseconds patience) {
  const auto index = static_cast<std::size_t>(rank);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    int status = 0;
    if (::waitpid(pids_[index], &status, WNOHANG) == pids_[index]) {
      is_reaped_[index] = true;
      return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Processes::is_stopped(int rank) const {
  std::ifstream file(fmt::format("/proc/{}/stat", pid(rank)));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() && text[end + 2] == 'T';
}

void Processes::kill(int rank, int signal) const { (void)::kill(pid(rank), signal); }

}  // namespace prl::comm::testing
