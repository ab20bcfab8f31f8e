#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/eventually.hpp"
#include "env/message_match.hpp"
#include "env/python/conversations.hpp"
#include "env/python/frame.hpp"
#include "env/python/install.hpp"
#include "env/python/installed.hpp"
#include "env/python/player.hpp"
#include "env/python/run_program.hpp"
#include "env/python/server.hpp"
#include "env/python/setup.hpp"
#include "env/python/task_pages.hpp"
#include "env/python/worker_files.hpp"
#include "env/testing/scripted_chat.hpp"
#include "text/json_python.hpp"

namespace prl::env::python {
namespace {

namespace json = boost::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

json::object object(const std::string& text) { return text::parse_json(text).as_object(); }
json::array array(const std::string& text) { return text::parse_json(text).as_array(); }

TEST(Frame, RoundTripAndLimits) {
  const json::object message = object(R"({"t": "log", "msg": "é\n", "n": 0.1})");
  const std::string frame = encode_frame(message);
  FrameHeader header;
  std::copy_n(frame.begin(), kFrameHeaderBytes, header.begin());
  ASSERT_EQ(decode_header(header), frame.size() - kFrameHeaderBytes);
  EXPECT_EQ(decode_payload(frame.substr(kFrameHeaderBytes)), message);
  EXPECT_EQ(decode_payload(encode_frame(message, kDefaultMaxFrameBytes, {R"("row":)", R"({"a":[1]})"}).substr(kFrameHeaderBytes)),
            object(R"({"t": "log", "msg": "é\n", "n": 0.1, "row": {"a": [1]}})"));
  EXPECT_THROW(encode_frame(message, 10), Error);
  EXPECT_THAT([&] { decode_header(header, 5); }, ThrowsMessage<Error>(HasSubstr("at most 5")));
  header[4] = 'M';
  EXPECT_THAT([&] { decode_header(header); }, ThrowsMessage<Error>(HasSubstr("codec")));
  for (const char* bad : {"", "[1]", "{\"id\": 1}", "{\"t\": \"x\"", "{\"t\": NaN}", "\xff\xfe"})
    EXPECT_THROW(decode_payload(bad), Error) << bad;
  EXPECT_THAT([&] { text_member(message, "n"); }, ThrowsMessage<Error>(HasSubstr("message 'log' of a Python worker: n is")));
}

TEST(Frame, NumbersOfAnySizeComeAndGoAsTheyAre) {
  const std::string payload =
      R"({"t":"call","messages":[{"role":"user","content":"x"}],"big":123456789012345678901234567890,"list":[1e400,-99999999999999999999],)"
      R"("data":{"n":18446744073709551616,"x":1,"text":"18446744073709551616"}})";
  const json::object message = decode_payload(payload);
  EXPECT_EQ(encode_frame(message).substr(kFrameHeaderBytes), payload);
  EXPECT_EQ(optional_number(message, "big", 0), 123456789012345678901234567890.0);
  EXPECT_THAT([&] { text_member(message, "big"); },
              ThrowsMessage<Error>(HasSubstr("big is 123456789012345678901234567890, wanted a text")));
  EXPECT_THAT([&] { integer_member(message, "big"); }, ThrowsMessage<Error>(HasSubstr("wanted an integer")));
  EXPECT_EQ(text_member(object_member(message, "data"), "text"), "18446744073709551616");
  EXPECT_THROW(decode_payload(R"({"t":18446744073709551616})"), Error);
}

TEST(MessageMatch, NumbersThatDifferInOneDigitDiffer) {
  const auto call = [](const std::string& number) {
    return json::value(object(R"({"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function",
        "function": {"name": "f", "arguments": "{\"a\": )" +
                              number + R"(}"}}]})"));
  };
  EXPECT_TRUE(is_same_message(call("18446744073709551616"), call("18446744073709551616 ")));
  EXPECT_FALSE(is_same_message(call("18446744073709551616"), call("18446744073709551617")));
  // Arguments that are an object are written out as they were given.
  const json::object given = text::parse_json(R"({"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments":
      {"n": 123456789012345678901234567890}}}]})",
                                              200, text::LargeNumbers::kKeepText)
                                 .as_object();
  EXPECT_EQ(plain_message(given).at("tool_calls").at(0).at("function").at("arguments"), R"({"n": 123456789012345678901234567890})");
  const json::object number =
      text::parse_json(R"({"role": "user", "content": 99999999999999999999})", 200, text::LargeNumbers::kKeepText).as_object();
  EXPECT_THROW(plain_message(number), Error);
}

TEST(MessageMatch, NullsOrderAndSpellingDoNotCount) {
  const json::value ours = object(R"({"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function",
      "function": {"name": "f", "arguments": "{\"a\": 1, \"b\": 2}"}}]})");
  const json::value theirs =
      object(R"({"content": null, "tool_calls": [{"index": 0, "function": {"arguments": "{\"b\":2,\"a\":1}", "name": "f"},
      "id": "c1", "type": "function"}], "role": "assistant", "reasoning_content": null, "refusal": null})");
  EXPECT_TRUE(is_same_message(ours, theirs));
  EXPECT_FALSE(is_same_message(ours, object(R"({"role": "assistant", "content": ""})")));
  EXPECT_FALSE(is_same_message(object(R"({"role": "user", "content": "a"})"), object(R"({"role": "user", "content": "b"})")));
  EXPECT_TRUE(is_same_message(object(R"({"role": "assistant", "content": "a", "reasoning": "r"})"),
                              object(R"({"role": "assistant", "content": "a", "reasoning_content": "r"})")));
  EXPECT_EQ(plain_message(theirs.as_object()).at("content"), "");
  EXPECT_FALSE(plain_message(theirs.as_object()).contains("refusal"));
  EXPECT_THROW(plain_message(object(R"({"content": "no role"})")), Error);
}

TEST(Conversations, CallsGoWhereTheyContinue) {
  testing::ScriptedChat first({});
  int num_opened = 0;
  Conversations conversations(&first, [&](const std::string&) {
    ++num_opened;
    return std::make_unique<testing::ScriptedChat>(std::deque<ChatTurn>{});
  });
  const json::array a = array(R"([{"role": "user", "content": "a"}])");
  json::array plain_a;
  auto& one = conversations.acquire("s", a, plain_a);
  EXPECT_EQ(one.client.get(), &first);
  const json::array b = array(R"([{"role": "user", "content": "b", "refusal": null}])");
  json::array plain_b;
  auto& two = conversations.acquire("s", b, plain_b);
  EXPECT_EQ(plain_b, array(R"([{"role": "user", "content": "b"}])"));
  EXPECT_NE(two.client.get(), &first) << "the first one is busy";
  const json::object reply = object(R"({"role": "assistant", "content": "x"})");
  conversations.release(one, &plain_a, &reply);
  conversations.release(two, &plain_b, &reply);
  const json::array next = array(
      R"([{"role": "user", "content": "b"}, {"role": "assistant", "content": "x", "tool_calls": null}, {"role": "user", "content": "c"}])");
  json::array plain;
  auto& again = conversations.acquire("s", next, plain);
  EXPECT_EQ(&again, &two);
  EXPECT_EQ(plain[1], reply) << "the reply as the ledger has it";
  conversations.acquire("other session", a, plain);
  EXPECT_EQ(num_opened, 2);
}

TEST(Sampling, TrainingKeepsTheTrainersDistribution) {
  wire::SamplingParams sampling;
  sampling.temperature = 0.7f;
  sampling.max_tokens = 50;
  const json::object sent = sampling_json(sampling);
  json::object called = sent;
  EXPECT_TRUE(apply_sampling(sampling, called, sent, true).empty());
  called["temperature"] = 0.1;
  called["max_tokens"] = 7;
  called["seed"] = 3;
  called["stop"] = array(R"(["</a>"])");
  wire::SamplingParams training = sampling;
  EXPECT_THAT(apply_sampling(training, called, sent, true), ElementsAre("temperature"));
  EXPECT_EQ(training.temperature, 0.7f);
  EXPECT_EQ(training.max_tokens, 7);
  EXPECT_THAT(training.stop, ElementsAre("</a>"));
  EXPECT_FALSE(training.seed);
  wire::SamplingParams evaluation = sampling;
  EXPECT_TRUE(apply_sampling(evaluation, called, sent, false).empty());
  EXPECT_EQ(evaluation.temperature, 0.1f);
}

TEST(TaskPages, KeepsThePagesUsedLastWithinTheirBytes) {
  asio::io_context context;
  int num_reads = 0;
  TaskPages pages({.page_rows = 4, .max_bytes = 200},
                  [&](Split, std::int64_t offset, std::int64_t limit) -> asio::awaitable<std::vector<json::object>> {
                    ++num_reads;
                    std::vector<json::object> rows;
                    for (std::int64_t i = offset; i < std::min<std::int64_t>(offset + limit, 10); ++i)
                      rows.push_back({{"index", i}, {"pad", "0123456789"}});
                    co_return rows;
                  });
  const auto row = [&](std::int64_t index) {
    auto reading = pages.row(Split::kTrain, index);
    auto future = asio::co_spawn(context, std::move(reading), asio::use_future);
    context.restart();
    context.run();
    return future.get();
  };
  EXPECT_EQ(row(1)->values.at("index"), 1);
  EXPECT_EQ(row(3)->values.at("index"), 3);
  EXPECT_EQ(num_reads, 1);
  EXPECT_EQ(row(9)->values.at("index"), 9);
  EXPECT_EQ(row(5)->values.at("index"), 5);
  EXPECT_EQ(num_reads, 3);
  row(1);
  EXPECT_EQ(num_reads, 4) << "the first page had to go";
  EXPECT_THROW(row(10), Error);
}

TEST(TaskPages, TheTextOfARowIsWhatItsRolloutsAreTold) {
  asio::io_context context;
  TaskPages pages({.page_rows = 4}, [](Split, std::int64_t offset, std::int64_t) -> asio::awaitable<std::vector<json::object>> {
    co_return std::vector<json::object>{
        {{"index", offset}, {"id", "7"}, {"hash", "abc"}, {"prompt", "not sent"}, {"data", json::object{{"x", 1}}}}};
  });
  const auto row = [&] {
    auto reading = pages.row(Split::kTrain, 0);
    auto future = asio::co_spawn(context, std::move(reading), asio::use_future);
    context.restart();
    context.run();
    return future.get();
  };
  const std::shared_ptr<const TaskRow> first = row();
  EXPECT_EQ(first->text, R"({"index":0,"id":"7","hash":"abc","data":{"x":1}})");
  EXPECT_EQ(first->values.at("prompt"), "not sent");
  EXPECT_EQ(row(), first) << "made once";
}

TEST(TaskPages, TheKeyOfATaskIsThatOfRunsThatKeptTheRowInItsInfo) {
  Task task;
  task.info["split"] = "train";
  Task before = task;
  EXPECT_EQ(task.key(), before.key());
  task.row = std::make_shared<const TaskRow>(TaskRow{{{"id", "7"}}, "text"});
  EXPECT_NE(task.key(), before.key());
  before.info["row"] = json::object{{"id", "7"}};
  EXPECT_EQ(task.key(), before.key());
}

TEST(Installed, IdsAndRecords) {
  EXPECT_EQ(plain_id("org/some_env==1.2"), "org/some-env");
  EXPECT_EQ(version_of("org/some_env==1.2"), "1.2");
  EXPECT_EQ(version_of("some-env@0.1"), "0.1");
  EXPECT_EQ(version_of("some-env"), "");
  const std::filesystem::path all = std::filesystem::path(::testing::TempDir()) / "prl-installed";
  std::filesystem::remove_all(all);
  EXPECT_FALSE(find_installed(all, "a"));
  for (const char* id : {"org/a", "b", "other/b"}) {
    InstalledEnv environment;
    environment.id = id;
    environment.version = "1.0";
    environment.folder = installed_folder(all, id);
    std::filesystem::create_directories(environment.folder);
    write_installed(environment);
  }
  std::filesystem::create_directories(all / "half-made");
  EXPECT_EQ(list_installed(all).size(), 3u);
  EXPECT_EQ(find_installed(all, "a")->id, "org/a");
  EXPECT_EQ(find_installed(all, "b")->id, "b") << "the exact one first";
  EXPECT_THAT([&] { static_cast<void>(find_installed(all, "a==2.0")); }, ThrowsMessage<Error>(HasSubstr("version 1.0 is installed")));
}

TEST(Installed, AFailedReplacementLeavesTheFormerInstallation) {
  namespace fs = std::filesystem;
  const fs::path all = fs::path(::testing::TempDir()) / "prl-replaced";
  fs::remove_all(all);
  InstalledEnv environment;
  environment.id = "a";
  environment.version = "1.0";
  environment.folder = installed_folder(all, "a");
  fs::create_directories(environment.folder / "venv");
  write_installed(environment);
  InstallOptions options;
  options.target = "a";
  options.all = all;
  options.overwrite = true;
  options.python = "/nowhere/python3";
  EXPECT_THROW(install_environment(options), Error);
  ASSERT_TRUE(find_installed(all, "a")) << "the former one works on";
  EXPECT_TRUE(fs::exists(environment.folder / "venv"));
  EXPECT_EQ(list_installed(all).size(), 1u);

  // Of an installation that was killed half-way.
  fs::rename(environment.folder, all / ".former-a");
  fs::create_directories(environment.folder / "venv/half");
  const int lock = ::open(lock_file(environment.folder).c_str(), O_RDWR);
  ASSERT_EQ(::flock(lock, LOCK_EX | LOCK_NB), 0);
  EXPECT_FALSE(find_installed(all, "a")) << "it is being made";
  EXPECT_TRUE(fs::exists(environment.folder / "venv/half"));
  ::close(lock);
  EXPECT_TRUE(find_installed(all, "a")) << "any command brings the former one back";
  EXPECT_FALSE(fs::exists(environment.folder / "venv/half"));
  EXPECT_FALSE(fs::exists(former_folder(environment.folder)));

  // PRL_ENVIRONMENTS may name a folder with other things in it.
  fs::create_directories(all / "mine");
  write_file_atomic(all / "mine/source.py", "x");
  options.target = "mine";
  EXPECT_THAT([&] { install_environment(options); }, ThrowsMessage<Error>(HasSubstr("source.py, which no installation put there")));
  EXPECT_TRUE(fs::exists(all / "mine/source.py"));
  write_file_atomic(environment.folder / "notes.txt", "x");
  EXPECT_THAT([&] { remove_environment(all, "a"); }, ThrowsMessage<Error>(HasSubstr("notes.txt")));
  fs::remove(environment.folder / "notes.txt");
  remove_environment(all, "a");
  EXPECT_FALSE(find_installed(all, "a"));
}

TEST(RunProgram, SaysWhatCameOfIt) {
  const ProgramResult done =
      run_program({"/bin/sh", "-c", "echo $WORD; pwd; exit 3"}, {.captures = true, .env = {{"WORD", "yes"}}, .folder = "/"});
  EXPECT_EQ(done.status, 3);
  EXPECT_EQ(done.output, "yes\n/\n");
  EXPECT_THAT([] { run_program({"/nowhere/pip"}); }, ThrowsMessage<Error>(HasSubstr("/nowhere/pip cannot be run: No such file")));
  EXPECT_EQ(run_program({"/bin/sh", "-c", "kill -9 $$"}).status, 128 + SIGKILL);
}

TEST(RunProgram, EndsWithTheProcessThatWaitsForIt) {
  const std::filesystem::path told = std::filesystem::path(::testing::TempDir()) / fmt::format("prl-orphan-{}", ::getpid());
  std::filesystem::remove(told);
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // so that the orphan is this process's to wait for
  const pid_t installer = ::fork();
  if (installer == 0) {
    run_program({"/bin/sh", "-c", fmt::format("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 60", told.string())});
    ::_exit(0);
  }
  ASSERT_TRUE(prl::testing::eventually([&] { return std::filesystem::exists(told); }));
  const pid_t orphan = std::stoi(read_file(told));
  ::kill(installer, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(installer, &status, 0), installer);
  EXPECT_EQ(::waitpid(orphan, &status, 0), orphan);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  std::filesystem::remove(told);
}

TEST(EnvServer, ListensForOthersWithATokenOnly) {
  ::unsetenv("PRL_ENV_TOKEN");
  std::stop_source stop;
  stop.request_stop();
  ServerOptions options;
  options.id = "words";
  options.settings.kind = "fake";
  for (const char* address : {"0.0.0.0:7000", ":::7000", "node1:7000"}) {
    options.address = address;
    EXPECT_THAT([&] { serve(options, stop.get_token()); }, ThrowsMessage<Error>(HasSubstr("PRL_ENV_TOKEN"))) << address;
  }
  ::setenv("PRL_ENV_TOKEN", "", 1);
  EXPECT_THROW(serve(options, stop.get_token()), Error) << "an empty secret is none";
  ::unsetenv("PRL_ENV_TOKEN");
}

TEST(Setup, AddressesAreOfWorkersOrOfOneServerOfTheLibrary) {
  PythonSettings settings;
  settings.kind = "fake";
  const auto plan = [&](const std::string& address) {
    settings.address = address;
    return plan_environment("words", "words", {}, settings).pool;
  };
  EXPECT_THAT(plan("a:7000, b:7001").addresses, ElementsAre("a:7000", "b:7001"));
  const PoolOptions relay = plan("tcp://a:5000");
  EXPECT_TRUE(relay.addresses.empty()) << "workers are started here";
  EXPECT_EQ(relay.load.at("relay").as_string(), "tcp://a:5000");
  EXPECT_FALSE(relay.isolate_network);
  for (const char* wrong : {"tcp://a:5000, tcp://b:5000", "tcp://a:5000, b:7000", "tcp://a", "a"})
    EXPECT_THAT([&] { plan(wrong); }, ThrowsMessage<Error>(HasSubstr("env.address: "))) << wrong;
}

TEST(WorkerFiles, AreUnpackedOnce) {
  const std::filesystem::path cache = std::filesystem::path(::testing::TempDir()) / "prl-worker-files";
  std::filesystem::remove_all(cache);
  const std::filesystem::path folder = unpack_worker(cache);
  EXPECT_TRUE(std::filesystem::exists(folder / "prl_worker/__main__.py"));
  const auto written = std::filesystem::last_write_time(folder / "prl_worker/__main__.py");
  EXPECT_EQ(unpack_worker(cache), folder);
  EXPECT_EQ(std::filesystem::last_write_time(folder / "prl_worker/__main__.py"), written);
  std::size_t num_files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) num_files += entry.is_regular_file() ? 1 : 0;
  EXPECT_EQ(num_files, worker_files().size());
  std::filesystem::remove_all(folder / "prl_worker/adapters");
  EXPECT_EQ(unpack_worker(cache), folder);
  EXPECT_TRUE(std::filesystem::exists(folder / "prl_worker/adapters/base.py")) << "a file that is missing is written again";
}

TEST(WorkerFiles, AreUnpackedByManyThreadsAtOnce) {
  const std::filesystem::path cache = std::filesystem::path(::testing::TempDir()) / "prl-worker-files-threads";
  std::filesystem::remove_all(cache);
  std::vector<std::jthread> threads;
  std::atomic<int> num_complete{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      const std::filesystem::path folder = unpack_worker(cache);
      const std::vector<WorkerFile> files = worker_files();
      if (std::ranges::all_of(files, [&](const WorkerFile& file) { return std::filesystem::exists(folder / file.path); })) ++num_complete;
    });
  threads.clear();
  EXPECT_EQ(num_complete, 4);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(cache), std::filesystem::directory_iterator()), 1) << "nothing is left over";
}

}  // namespace
}  // namespace prl::env::python
