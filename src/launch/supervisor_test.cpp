#include "launch/supervisor.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fmt/format.h>

#include <thread>

#include "base/files.hpp"
#include "base/testing/eventually.hpp"

namespace prl::launch {
namespace {

ChildSpec shell(const std::string& name, const std::string& script, bool must_finish = true) {
  ChildSpec child;
  child.name = name;
  child.argv = {"/bin/sh", "-c", script};
  child.env = {{"PRL_TEST_WORD", "hello"}};
  child.log_file = std::filesystem::temp_directory_path() / ("prl_supervisor_" + name + ".log");
  child.must_finish = must_finish;
  return child;
}

TEST(Supervisor, EndsWellWhenAllFinish) {
  Supervisor supervisor;
  supervisor.start(shell("a", "echo out $PRL_TEST_WORD; echo err >&2"));
  supervisor.start(shell("server", "exec sleep 60", false));
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  const std::string log = read_file(std::filesystem::temp_directory_path() / "prl_supervisor_a.log");
  EXPECT_NE(log.find("out hello"), std::string::npos);
  EXPECT_NE(log.find("err"), std::string::npos);
}

TEST(Supervisor, AChildThatWasReadyIsStartedAgainAsOftenAsItMay) {
  const std::filesystem::path count = std::filesystem::temp_directory_path() / fmt::format("prl_supervisor_count_{}", ::getpid());
  std::filesystem::remove(count);
  // Dies twice after it was ready, then ends well.
  ChildSpec child = shell("again", fmt::format("echo x >> {0}; echo serving; [ $(wc -l < {0}) -gt 2 ] || kill -9 $$", count.string()));
  child.ready_mark = "serving";
  child.max_restarts = 2;
  Supervisor patient;
  patient.start(child);
  EXPECT_EQ(patient.run({}), std::nullopt);
  EXPECT_EQ(read_file(count), "x\nx\nx\n");
  std::filesystem::remove(count);
  child.max_restarts = 1;
  Supervisor impatient;
  impatient.start(child);
  const auto failure = impatient.run({});
  ASSERT_TRUE(failure.has_value());
  EXPECT_NE(failure->find("again was killed by signal 9"), std::string::npos) << *failure;
  // One that dies before it is ready would die again.
  std::filesystem::remove(count);
  child.ready_mark = "never said";
  Supervisor strict;
  strict.start(child);
  EXPECT_TRUE(strict.run({}).has_value());
  EXPECT_EQ(read_file(count), "x\n");
  std::filesystem::remove(count);
}

TEST(Supervisor, ARoleThatResumesIsStartedAgainAfterASignalAloneAndKnowsHowOften) {
  // Killed twice, wherever it is; the third time it says how often it was started again.
  ChildSpec child = shell("resumes", "[ \"${PRL_RESTARTS:-0}\" -lt 2 ] && kill -9 $$; echo restarts $PRL_RESTARTS");
  std::filesystem::remove(child.log_file);
  child.max_restarts = 2;
  child.restarts_after_signals_only = true;
  Supervisor patient;
  patient.start(child);
  EXPECT_EQ(patient.run({}), std::nullopt);
  EXPECT_NE(read_file(child.log_file).find("restarts 2"), std::string::npos);
  child.argv = {"/bin/sh", "-c", "exit 3"};
  Supervisor strict;
  strict.start(child);
  const auto failure = strict.run({});
  ASSERT_TRUE(failure.has_value());
  EXPECT_NE(failure->find("3"), std::string::npos) << *failure;
  EXPECT_FALSE(strict.was_killed("resumes"));
}

TEST(Supervisor, TheOthersGoOnWithoutAnOptionalChild) {
  // Killed whenever it is started; the other one is done when it has been given up.
  const std::filesystem::path count = std::filesystem::temp_directory_path() / fmt::format("prl_supervisor_optional_{}", ::getpid());
  std::filesystem::remove(count);
  ChildSpec optional = shell("optional", fmt::format("echo x >> {}; kill -9 $$", count.string()));
  optional.is_optional = true;
  optional.max_restarts = 1;
  optional.restarts_after_signals_only = true;
  ::testing::internal::CaptureStderr();
  Supervisor supervisor;
  supervisor.start(optional);
  supervisor.start(shell("needed", fmt::format("until [ \"$(wc -l < {})\" = 2 ]; do sleep 0.05; done; sleep 0.5; exit 0", count.string())));
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("optional was killed by signal 9"), std::string::npos) << told;
  EXPECT_NE(told.find("prl_supervisor_optional.log. The run goes on without it"), std::string::npos) << told;
  EXPECT_EQ(told.find("goes on without it"), told.rfind("goes on without it")) << "told once: " << told;
  EXPECT_EQ(read_file(count), "x\nx\n");
  std::filesystem::remove(count);
  // The one that is needed ends the run as ever.
  optional.argv[2] = "exec sleep 60";
  Supervisor strict;
  strict.start(optional);
  strict.start(shell("needed", "exit 3"));
  const auto failure = strict.run({});
  ASSERT_TRUE(failure.has_value());
  EXPECT_NE(failure->find("needed"), std::string::npos) << *failure;
}

TEST(Supervisor, AStoppedChildIsReplacedOrGoesOnWhenItIsContinued) {
  // Stops itself the first time and would never go on.
  ChildSpec child = shell("stopped", "[ -n \"$PRL_RESTARTS\" ] || kill -STOP $$; echo restarts \"$PRL_RESTARTS\"");
  std::filesystem::remove(child.log_file);
  child.max_restarts = 1;
  child.max_stopped = std::chrono::milliseconds(300);
  ::testing::internal::CaptureStderr();
  Supervisor supervisor;
  supervisor.start(child);
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("it was stopped for"), std::string::npos);
  EXPECT_NE(read_file(child.log_file).find("restarts 1"), std::string::npos);
  // Without a restart left it is named and waited for.
  child.argv[2] = "kill -STOP $$; echo went on";
  child.max_restarts = 0;
  std::filesystem::remove(child.log_file);
  ::testing::internal::CaptureStderr();
  Supervisor patient;
  patient.start(child);
  std::jthread later([pid = patient.pid_of("stopped")] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5'000));
    ::kill(pid, SIGCONT);
  });
  EXPECT_EQ(patient.run({}), std::nullopt);
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("is stopped by a signal; SIGCONT lets it go on\n"), std::string::npos) << told;
  EXPECT_NE(read_file(child.log_file).find("went on"), std::string::npos);
}

/// Takes connections on a port of its own, answers the first `num_answers` of them with status 200, and then hangs.
class TinyServer {
 public:
  explicit TinyServer(int num_answers) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(socket_, 16), 0);
    EXPECT_EQ(::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::jthread([this, num_answers] { answer(num_answers); });
  }
  ~TinyServer() {
    ::shutdown(socket_, SHUT_RDWR);  // ends accept()
    thread_ = {};
    ::close(socket_);
  }
  std::string url() const { return fmt::format("http://127.0.0.1:{}/health", port_); }

 private:
  void answer(int num_answers) const {
    for (int client = 0; num_answers-- > 0 && (client = ::accept(socket_, nullptr, nullptr)) >= 0;) {
      char request[4096];
      (void)::read(client, request, sizeof request);
      constexpr std::string_view kReply = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
      (void)::write(client, kReply.data(), kReply.size());
      ::close(client);
    }
  }
  int socket_;
  int port_ = 0;
  std::jthread thread_;
};

TEST(Supervisor, AChildThatHangsIsReplacedAndOneThatIsWellIsNot) {
  const TinyServer hangs(1);
  ChildSpec child = shell("hung", "echo serving; [ -n \"$PRL_RESTARTS\" ] || exec sleep 600; echo restarts \"$PRL_RESTARTS\"");
  std::filesystem::remove(child.log_file);
  child.ready_mark = "serving";
  child.max_restarts = 1;
  child.health_url = hangs.url();
  child.max_hung = std::chrono::milliseconds(400);
  ::testing::internal::CaptureStderr();
  Supervisor supervisor;
  supervisor.start(child);
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("has not said at " + hangs.url() + " that it is well"), std::string::npos) << told;
  EXPECT_NE(told.find("it did not say that it is well for"), std::string::npos) << told;
  EXPECT_NE(read_file(child.log_file).find("restarts 1"), std::string::npos);
  // Neither is one that answers, nor one whose restarts are used up, nor one that has not served yet, nor one at an address where nothing
  // ever answered.
  for (const char* kind : {"well", "without restarts", "starting", "elsewhere"}) {
    const TinyServer server(kind == std::string_view("well") ? 1'000'000 : kind == std::string_view("elsewhere") ? 0 : 1);
    ChildSpec other = child;
    other.health_url = server.url();
    other.name = fmt::format("other {}", kind);
    other.argv[2] = "echo serving; sleep 3; echo went on";
    if (kind == std::string_view("well")) other.max_hung = std::chrono::milliseconds(2'000);
    if (kind == std::string_view("without restarts")) other.max_restarts = 0;
    if (kind == std::string_view("starting")) other.ready_mark = "never said";
    std::filesystem::remove(other.log_file);
    Supervisor patient;
    patient.start(other);
    EXPECT_EQ(patient.run({}), std::nullopt) << kind;
    EXPECT_NE(read_file(other.log_file).find("went on"), std::string::npos) << kind;
  }
}

TEST(Supervisor, ShowsWarningsAndErrorsOfEveryRole) {
  EXPECT_EQ(console_line("inference", "10:00:00 WARNING the disk is slow"), "10:00:00 WARNING [inference] the disk is slow");
  EXPECT_EQ(console_line("inference", "10:00:00   ERROR [x] no"), "10:00:00   ERROR [inference] [x] no");
  const std::string json = R"({"timestamp":1.0,"level":"WARNING","message":"slow"})";
  EXPECT_EQ(console_line("inference", json), json);
  for (const std::string score : {"10:00:00 SUCCESS [eval] [step 2] Evaluated gsm8k in 1.00s (Avg@1=0.5)",
                                  R"({"level":"SUCCESS","message":"[eval] [step 2] Evaluated gsm8k in 1.00s"})"})
    EXPECT_EQ(console_line("evals", score), score);
  const std::string progress = "10:00:00    INFO collecting batch 3: 2/16 rollouts, 8 in flight, policy v2";
  EXPECT_EQ(console_line("orchestrator", progress), progress);
  for (const char* line : {"", "10:00:00    INFO a WARNING in the text", "10:00:00 SUCCESS done", R"({"level":"INFO"})"})
    EXPECT_EQ(console_line("inference", line), std::nullopt) << line;
  Supervisor supervisor;
  supervisor.start(
      shell("quiet", "echo '10:00:00    INFO one'; printf '10:00:01 WARN'; sleep 0.05; echo 'ING two'; echo '10:00:02 SUCCESS three'"));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  const std::string shown = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(shown.find("10:00:01 WARNING [quiet] two\n"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("one"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("three"), std::string::npos) << shown;
}

ChildSpec rank(const std::string& name, const std::string& script, int max_losses) {
  ChildSpec spec = shell(name, script);
  std::filesystem::remove(spec.log_file);
  spec.group = "ranks";
  spec.max_losses = max_losses;
  spec.backoff = std::chrono::milliseconds(5);
  return spec;
}

TEST(Supervisor, ALostRankIsStartedAgainWhileTheOthersGoOn) {
  Supervisor supervisor;
  const ChildSpec lost = rank("lost", "if [ -n \"$PRL_JOIN\" ]; then echo joined as $PRL_JOIN; exit 0; fi; kill -9 $$", 2);
  const std::string log = lost.log_file.string();
  supervisor.start(lost);
  supervisor.start(rank("other", "i=0; until grep -q joined " + log + "; do i=$((i+1)); [ $i -gt 500 ] && exit 3; sleep 0.02; done", 2));
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  EXPECT_NE(read_file(log).find("joined as lost-1"), std::string::npos);
}

TEST(Supervisor, ARankThatFailsBeforeAllHaveMetIsStartedAsAtFirst) {
  Supervisor supervisor;
  ChildSpec early = rank("early", "", 2);
  const std::string count = early.log_file.string() + ".count", is_second = "[ $(grep -c once " + count + ") -ge 2 ]";
  std::filesystem::remove(count);
  early.argv.back() = "echo joins: $PRL_JOIN.; echo once >> " + count + "; " + is_second + " && exit 0; kill -9 $$";
  early.has_met = [] { return false; };
  supervisor.start(early);
  supervisor.start(rank("other", "i=0; until " + is_second + "; do i=$((i+1)); [ $i -gt 500 ] && exit 3; sleep 0.02; done", 2));
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  EXPECT_EQ(read_file(early.log_file), "joins: .\njoins: .\n");
}

TEST(Supervisor, TheLastRankOfANodeIsStartedAgainWhileThoseOfOtherNodesGoOn) {
  ChildSpec lost = rank("alone", "if [ -n \"$PRL_JOIN\" ]; then echo joined; exec sleep 60; fi; kill -9 $$", 2);
  lost.has_members_elsewhere = true;
  std::stop_source gone;
  Supervisor supervisor;
  supervisor.set_others_gone(gone.get_token());
  supervisor.start(lost);
  const std::jthread ending([&] {
    EXPECT_TRUE(prl::testing::eventually([&] { return read_file(lost.log_file).find("joined") != std::string::npos; }));
    gone.request_stop();
  });
  EXPECT_EQ(supervisor.run({}), std::nullopt) << "it waits to join ranks that have ended";
  EXPECT_NE(read_file(lost.log_file).find("joined"), std::string::npos);
}

TEST(Supervisor, MoreLossesThanAllowedEndTheRun) {
  Supervisor supervisor;
  supervisor.start(rank("lost", "kill -9 $$", 1));
  supervisor.start(rank("other", "exec sleep 60", 1));
  const auto failure = supervisor.run({});
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->find("lost was killed by signal 9"), std::string::npos) << *failure;
}

TEST(Supervisor, ARankThatIsStoppedDoesNotKeepTheRunAlive) {
  Supervisor supervisor;
  supervisor.start(rank("stopped", "kill -STOP $$; sleep 60", 1));
  supervisor.start(rank("other", "sleep 0.2", 1));
  EXPECT_EQ(supervisor.run({}), std::nullopt);
}

TEST(Supervisor, ChildrenThatMayEndComeAndGoWhileTheOthersRun) {
  ChildSpec guest = shell("guest", "exit 0", false), failing = shell("failing", "exit 3", false);
  guest.may_end = guest.is_optional = true;
  failing.may_end = failing.is_optional = true;
  const std::filesystem::path done = std::filesystem::temp_directory_path() / fmt::format("prl_supervisor_done_{}", ::getpid());
  std::filesystem::remove(done);
  Supervisor supervisor;
  supervisor.start(shell("host", fmt::format("while ! [ -e {} ]; do sleep 0.02; done", done.string())));
  int num_guests = 0;
  supervisor.set_on_look([&] {
    if (num_guests == 0) supervisor.start(failing);
    if (num_guests == 3 || supervisor.is_running("guest")) return;
    supervisor.start(guest);
    if (++num_guests == 3) write_file_atomic(done, "");
  });
  EXPECT_EQ(supervisor.run({}), std::nullopt);
  EXPECT_EQ(num_guests, 3);
  EXPECT_FALSE(supervisor.is_running("guest"));
  std::filesystem::remove(done);
}

TEST(Supervisor, NamesAThreadLimit) {
  Supervisor supervisor;
  supervisor.start(
      shell("many",
            "echo \"terminate called after throwing an instance of 'std::system_error'\"; echo '  what():  Resource temporarily "
            "unavailable'; kill -ABRT $$"));
  const auto failure = supervisor.run({});
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->find("many was killed by signal 6 (Aborted): the operating system starts no more threads"), std::string::npos)
      << *failure;
}

TEST(Supervisor, NamesTheRoleThatFailed) {
  Supervisor supervisor;
  supervisor.start(shell("good", "exec sleep 60"));
  supervisor.start(shell("bad", "echo '10:00:00   ERROR first'; echo '10:00:01   ERROR [x] the disk is full (io)'; echo bye; exit 3"));
  const auto failure = supervisor.run({});
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->find("bad exited with status 3: [x] the disk is full (io); see "), std::string::npos) << *failure;
}

TEST(Supervisor, NoticesAKillAndAnEarlyServerExit) {
  Supervisor killed;
  killed.start(shell("victim", "kill -9 $$"));
  const auto failure = killed.run({});
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->find("victim was killed by signal 9"), std::string::npos) << *failure;
  Supervisor early;
  early.start(shell("worker", "exec sleep 60"));
  early.start(shell("server", "exit 0", false));
  EXPECT_TRUE(early.run({}));
}

TEST(Supervisor, StopsOnRequestAndKillsTheStubborn) {
  Supervisor supervisor;
  std::stop_source source;
  supervisor.start(shell("polite", "exec sleep 60"));
  std::jthread later([&] { source.request_stop(); });
  EXPECT_EQ(supervisor.run(source.get_token()), std::nullopt);
  Supervisor stubborn;
  stubborn.start(shell("stubborn", "trap '' TERM; while true; do sleep 1; done"));
  const pid_t pid = stubborn.pid_of("stubborn");
  stubborn.terminate_all(std::chrono::milliseconds(300));
  EXPECT_NE(::kill(pid, 0), 0);
}

TEST(Supervisor, NamesARoleThatDiesWhileItStops) {
  Supervisor supervisor;
  const ChildSpec spec = shell("crashing", "trap 'kill -9 $$' TERM; echo ready; while true; do sleep 0.05; done");
  std::filesystem::remove(spec.log_file);
  supervisor.start(spec);
  std::stop_source source;
  const auto log_size = [&] {
    std::error_code ignored;
    return std::filesystem::file_size(spec.log_file, ignored);
  };
  std::jthread later([&] {
    EXPECT_TRUE(prl::testing::eventually([&] { return log_size() > 0; }));
    source.request_stop();
  });
  const auto failure = supervisor.run(source.get_token());
  ASSERT_TRUE(failure);
  EXPECT_NE(failure->find("crashing was killed by signal 9"), std::string::npos) << *failure;
}

}  // namespace
}  // namespace prl::launch
