#include "env/python/worker_templates.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/testing/eventually.hpp"
#include "env/python/frame.hpp"
#include "env/python/setup.hpp"
#include "env/python/worker_files.hpp"
#include "text/json_python.hpp"

/// Workers that are forked from templates, asked over their connections. The modules that the templates import are written here.
namespace prl::env::python {
namespace {

namespace json = boost::json;
namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// One line in the file `imports` for each time that the module is imported.
constexpr const char* kProbe = R"py(
import ctypes, os, random, resource, tempfile, threading
with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
    file.write(f"{os.getpid()}\n")
UNSEEDED, SEEDED = random.Random(), random.Random(7)

def look():
    getenv = ctypes.CDLL(None).secure_getenv
    getenv.restype = ctypes.c_char_p
    return {"heeded": (getenv(b"JE_ARROW_MALLOC_CONF") or b"").decode(), "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "folder": os.getcwd(), "temporary": tempfile.gettempdir(),
            "unseeded": UNSEEDED.random(), "seeded": SEEDED.random(), "global": random.random(), "threads": threading.active_count(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "memory": resource.getrlimit(resource.RLIMIT_AS)[0],
            "cpu": resource.getrlimit(resource.RLIMIT_CPU)[0], "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "network": os.readlink("/proc/self/ns/net"), "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
                for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))}

def start_threads(wanted):
    stop = threading.Event()
    for number in range(wanted):
        try:
            threading.Thread(target=stop.wait, daemon=True).start()
        except RuntimeError:
            return number
    return wanted
)py";

class ForkedWorker {
 public:
  explicit ForkedWorker(ChildProcess child) : child_(std::move(child)), connection_(child_.release_connection()) {
    send({{"t", "hello"}, {"protocol", 1}, {"seed", 3}});
    receive("hello_ok");
  }
  ~ForkedWorker() { ::close(connection_); }
  ForkedWorker(const ForkedWorker&) = delete;
  ForkedWorker& operator=(const ForkedWorker&) = delete;

  json::value call(const std::string& function, json::array args = {}) {
    json::object message{{"t", "call"}, {"id", "c"}, {"deadline_s", 20}};
    message["function"] = function;
    message["args"] = std::move(args);
    message["paths"] = json::array{json::value(folder)};
    send(message);
    return receive("returned").at("value");
  }
  json::object look() { return call("probe:look").as_object(); }
  ChildProcess& child() { return child_; }
  static inline std::string folder;  ///< that has the modules

 private:
  void send(const json::object& message) {
    const std::string frame = encode_frame(message);
    ASSERT_EQ(::write(connection_, frame.data(), frame.size()), static_cast<ssize_t>(frame.size()));
  }
  void read_all(void* out, std::size_t size) {
    for (std::size_t got = 0; got < size;) {
      pollfd wait{connection_, POLLIN, 0};
      if (::poll(&wait, 1, 30'000) != 1) fail(ErrorCode::kDeadline, "the worker says nothing");
      const ssize_t n = ::read(connection_, static_cast<char*>(out) + got, size - got);
      if (n <= 0) fail(ErrorCode::kUnavailable, "the worker's connection ended");
      got += static_cast<std::size_t>(n);
    }
  }
  json::object receive(const std::string& type) {
    for (;;) {
      FrameHeader header{};
      read_all(header.data(), header.size());
      std::string payload(decode_header(header), '\0');
      read_all(payload.data(), payload.size());
      json::object message = decode_payload(payload);
      if (text_member(message, "t") == type) return message;
      if (text_member(message, "t") != "log") fail(ErrorCode::kCorrupt, "wanted {}, got {}", type, payload);
    }
  }

  ChildProcess child_;
  int connection_;
};

class WorkerTemplatesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(::testing::TempDir()) / fmt::format("prl-templates-{}", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    ForkedWorker::folder = folder_.string();
    write("probe.py", kProbe);
    log_ = std::make_shared<WorkerLog>(folder_ / "log");
  }

  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  std::string read(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(folder_ / name).rdbuf();
    return text.str();
  }
  std::int64_t num_imports() const {
    const std::string text = read("imports");
    return std::count(text.begin(), text.end(), '\n');
  }

  TemplateOptions options(const std::string& module = "probe") const {
    return {.name = module,
            .python = default_interpreter("probe").string(),
            .env = worker_variables({}, unpack_worker(cache_folder()), true),
            .limits = {.memory_bytes = std::int64_t{4} << 30, .num_processes = 200, .num_files = 500, .cpu_seconds = 60},
            .isolate_network = can_isolate_network(),
            .kind = "auto",
            .env_id = module,
            .paths = {folder_.string()}};
  }

  WorkerTemplates::Started start(WorkerTemplates::Environment& environment, const TemplateOptions& shared) {
    const std::string name = fmt::format("worker-{}", num_started_++);
    ChildOptions child{.name = name,
                       .argv = {shared.python, "-m", "prl_worker", "--fd", std::to_string(kConnectionFd)},
                       .env = shared.env,
                       .folder = folder_ / name,
                       .limits = shared.limits,
                       .isolate_network = shared.isolate_network};
    fs::create_directories(child.folder);
    child.env.push_back("PRL_TMPDIR=" + child.folder.string());
    auto started = std::make_shared<std::promise<WorkerTemplates::Started>>();
    auto future = started->get_future();
    environment.start(std::move(child), [started](WorkerTemplates::Started one) { started->set_value(std::move(one)); });
    if (future.wait_for(60s) != std::future_status::ready) fail(ErrorCode::kDeadline, "no worker");
    return future.get();
  }

  /// The children of this process that are templates.
  static std::set<pid_t> template_pids() {
    std::set<pid_t> pids;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      std::ifstream stat(entry.path() / "stat");
      pid_t pid = 0;
      pid_t parent = 0;
      std::string name;
      char state = 0;
      if (stat >> pid >> name >> state >> parent && parent == ::getpid() && name == "(prl-template)" && state != 'Z') pids.insert(pid);
    }
    return pids;
  }

  fs::path folder_;
  std::shared_ptr<WorkerLog> log_;
  int num_started_ = 0;
};

TEST_F(WorkerTemplatesTest, WorkersShareImportsAndNothingElse) {
  TemplateOptions wanted = options();
  wanted.limits.num_processes = 40;
  const auto templates = std::make_shared<WorkerTemplates>();
  WorkerTemplates::Environment environment(templates, wanted, log_);
  ForkedWorker first(std::move(start(environment, wanted).child.value()));
  ForkedWorker second(std::move(start(environment, wanted).child.value()));
  EXPECT_EQ(num_imports(), 1) << "in the template alone";
  EXPECT_EQ(template_pids().size(), 2U) << "of the library and of the module";

  const json::object a = first.look();
  const json::object b = second.look();
  for (const char* different : {"pid", "group", "folder", "temporary", "unseeded"})
    EXPECT_NE(a.at(different), b.at(different)) << different;
  for (const char* same : {"parent", "seeded", "global", "sockets"}) EXPECT_EQ(a.at(same), b.at(same)) << same;
  EXPECT_EQ(a.at("heeded").as_string(), "background_thread:false") << "whatever the user ids are";
  EXPECT_EQ(a.at("pid").as_int64(), first.child().pid());
  EXPECT_EQ(a.at("group").as_int64(), first.child().pid());
  EXPECT_EQ(a.at("parent").as_int64(), ::getpid());
  EXPECT_EQ(a.at("folder").as_string(), (folder_ / "worker-0").string());
  EXPECT_EQ(a.at("temporary").as_string(), (folder_ / "worker-0").string());
  if (wanted.isolate_network) {
    EXPECT_NE(a.at("network"), b.at("network"));
  }
  // Limits of each: what one uses is not taken from the other, nor what the template has used.
  EXPECT_EQ(b.at("files").as_int64(), 500);
  EXPECT_EQ(b.at("memory").as_int64(), std::int64_t{4} << 30);
  EXPECT_EQ(b.at("cpu").as_int64(), 60);
  EXPECT_EQ(b.at("processes").as_int64(), 40);
  if (wanted.isolate_network || ::geteuid() == 0) {
    EXPECT_EQ(first.call("probe:start_threads", {30}).as_int64(), 30);
    EXPECT_EQ(second.call("probe:start_threads", {30}).as_int64(), 30);
    EXPECT_LT(second.call("probe:start_threads", {30}).as_int64(), 30);
  }
}

TEST_F(WorkerTemplatesTest, EnvironmentsShareTheTemplateOfTheLibrary) {
  write("other.py", "import probe\n");
  const auto templates = std::make_shared<WorkerTemplates>();
  WorkerTemplates::Environment one(templates, options(), log_);
  auto two = std::make_unique<WorkerTemplates::Environment>(templates, options("other"), log_);
  const auto a = start(one, options());
  const auto b = start(*two, options("other"));
  ASSERT_TRUE(a.child && b.child);
  EXPECT_EQ(template_pids().size(), 3U);
  two.reset();
  EXPECT_TRUE(prl::testing::eventually([] { return template_pids().size() == 2; })) << "that of a module ends with its environment";
}

TEST_F(WorkerTemplatesTest, AKilledTemplateIsReplaced) {
  const auto templates = std::make_shared<WorkerTemplates>();
  WorkerTemplates::Environment environment(templates, options(), log_);
  ForkedWorker before(std::move(start(environment, options()).child.value()));
  for (const pid_t pid : template_pids()) ::kill(pid, SIGKILL);
  EXPECT_TRUE(prl::testing::eventually([] { return template_pids().empty(); }));
  ForkedWorker after(std::move(start(environment, options()).child.value()));
  EXPECT_EQ(num_imports(), 2) << "in a template each";
  EXPECT_EQ(template_pids().size(), 2U);
  EXPECT_EQ(before.look().at("pid").as_int64(), before.child().pid()) << "workers do not need the template that they came from";
  EXPECT_FALSE(after.child().status());
}

TEST_F(WorkerTemplatesTest, ModulesThatLeaveSomethingBehindAreImportedByWorkers) {
  const std::map<std::string, std::string> left{
      {"threads", "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='poller').start()\n"},
      {"descriptors", "import socket\nSOCKET = socket.socket()\n"},
      {"processes", "import subprocess\nCHILD = subprocess.Popen(['sleep', '60'])\n"},
      {"failed", "import no_such_module_at_all\n"},
      {"dead", "import os\nif not os.environ['TMPDIR'].startswith(os.path.dirname(__file__)): os._exit(3)\n"}};
  const auto templates = std::make_shared<WorkerTemplates>();
  for (const auto& [name, code] : left) {
    SCOPED_TRACE(name);
    write(name + ".py", "import probe\n" + code);
    fs::remove(folder_ / "imports");
    WorkerTemplates::Environment environment(templates, options(name), log_);
    ForkedWorker worker(std::move(start(environment, options(name)).child.value()));
    EXPECT_TRUE(prl::testing::eventually([] { return template_pids().size() == 1; })) << "the template of the module is gone";
    EXPECT_EQ(num_imports(), 1);
    EXPECT_EQ(worker.look().at("pid").as_int64(), worker.child().pid());
    EXPECT_EQ(num_imports(), 2) << "by the worker itself";
  }
}

TEST_F(WorkerTemplatesTest, WithoutATemplateWorkersAreExecuted) {
  TemplateOptions wanted = options();
  // The template's own start is refused; a worker's is not.
  wanted.python = (folder_ / "python").string();
  write("python", fmt::format("#!/bin/sh\ncase \"$*\" in *--template*) exit 9;; esac\nexec {} \"$@\"\n", options().python));
  fs::permissions(wanted.python, fs::perms::owner_all);
  const auto templates = std::make_shared<WorkerTemplates>();
  WorkerTemplates::Environment environment(templates, wanted, log_);
  ForkedWorker worker(std::move(start(environment, wanted).child.value()));
  EXPECT_TRUE(template_pids().empty());
  const json::object seen = worker.look();
  EXPECT_EQ(seen.at("pid").as_int64(), worker.child().pid());
  EXPECT_EQ(seen.at("temporary").as_string(), (folder_ / "worker-0").string());
  wanted.python = "/no/such/python";
  WorkerTemplates::Environment none(templates, wanted, log_);
  const WorkerTemplates::Started started = start(none, wanted);
  EXPECT_FALSE(started.child);
  EXPECT_THAT(started.problem, HasSubstr("/no/such/python"));
}

TEST_F(WorkerTemplatesTest, WorkersDieWithTheThreadOfTheTemplates) {
  auto templates = std::make_shared<WorkerTemplates>();
  auto environment = std::make_unique<WorkerTemplates::Environment>(templates, options(), log_);
  WorkerTemplates::Started started = start(*environment, options());
  ASSERT_TRUE(started.child);
  environment.reset();
  templates.reset();
  EXPECT_TRUE(template_pids().empty());
  EXPECT_TRUE(prl::testing::eventually([&] { return started.child->status().has_value(); }));
  EXPECT_EQ(describe_status(started.child->status().value()), "was killed by signal 9 (Killed)");
}

}  // namespace
}  // namespace prl::env::python
