#include "server/adapter_book.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <functional>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace prl::server {
namespace {
using ::testing::ElementsAre;

ErrorCode code_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(AdapterBook, KeepsAFewInMemoryAndReadsOthersAgainWhenTheyAreNamed) {
  engine::AdapterSet set(4);
  std::vector<std::string> read;
  bool is_gone = false;
  const auto loader = [&](const std::string&, const WeightSource& source, PolicyVersion) -> engine::AdapterWeights {
    if (is_gone) fail(ErrorCode::kNotFound, "{} is gone", source.describe());
    read.push_back(source.describe());
    return {std::make_shared<nn::Adapter>(), nullptr};
  };
  AdapterBook book(set, loader, 2);
  book.load("a", {.folder = "/x/a"}, false);
  book.load("b", {.folder = "/x/step_7"}, false);
  book.require("a");
  book.load("c", {.folder = "/x/c"}, false);  // b was named least recently
  EXPECT_TRUE(set.has("a"));
  EXPECT_FALSE(set.has("b"));
  EXPECT_TRUE(book.knows("b"));
  book.require("b");
  EXPECT_TRUE(set.has("b"));
  EXPECT_FALSE(set.has("a"));
  book.require("b");
  EXPECT_THAT(read, ElementsAre("/x/a", "/x/step_7", "/x/c", "/x/step_7"));
  is_gone = true;
  EXPECT_EQ(code_of([&] { book.require("a"); }), ErrorCode::kNotFound);
  book.require("b");
  is_gone = false;
  book.require("a");

  const auto list = book.list();
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].version.value, 1);
  EXPECT_EQ(list[1].version.value, 7);
  EXPECT_EQ(list[1].source.folder, "/x/step_7");
}

TEST(AdapterBook, OneOfATrainerHasTheVersionThatItWasAskedForIn) {
  engine::AdapterSet set(4);
  std::vector<std::string> asked;
  const auto loader = [&](const std::string& name, const WeightSource& source, PolicyVersion version) -> engine::AdapterWeights {
    asked.push_back(fmt::format("{} v{} of {}", name, version.value, source.describe()));
    return {std::make_shared<nn::Adapter>(), nullptr};
  };
  AdapterBook book(set, loader, 1);
  const WeightSource trainer{.folder = {}, .store = "tcp://node0:29501"};
  book.load("a", trainer, true, PolicyVersion{4});
  book.load("a", trainer, true, PolicyVersion{9});
  set.apply_news();
  EXPECT_EQ(set.find("a")->version.value, 9);
  book.load("b", trainer, true, PolicyVersion{2});
  EXPECT_FALSE(set.has("a"));
  book.require("a");
  EXPECT_EQ(set.find("a")->version.value, 9);
  EXPECT_THAT(asked, ElementsAre("a v4 of tcp://node0:29501", "a v9 of tcp://node0:29501", "b v2 of tcp://node0:29501",
                                 "a v9 of tcp://node0:29501"));
  EXPECT_EQ(book.list()[0].source.describe(), "tcp://node0:29501");
}

TEST(AdapterBook, ReplacesOnRequestOnlyAndForgets) {
  engine::AdapterSet set(4);
  bool is_broken = false;
  AdapterBook book(
      set,
      [&](const std::string&, const WeightSource&, PolicyVersion) -> engine::AdapterWeights {
        if (is_broken) fail(ErrorCode::kCorrupt, "truncated");
        return {std::make_shared<nn::Adapter>(), nullptr};
      },
      8);
  book.load("a", {.folder = "/x/a"}, false);
  const auto held = set.find("a");
  EXPECT_EQ(code_of([&] { book.load("a", {.folder = "/x/b"}, false); }), ErrorCode::kAlreadyExists);
  is_broken = true;
  EXPECT_EQ(code_of([&] { book.load("a", {.folder = "/x/b"}, true); }), ErrorCode::kCorrupt);
  EXPECT_EQ(book.list()[0].source.folder, "/x/a");
  EXPECT_FALSE(set.has_news());
  is_broken = false;
  book.load("a", {.folder = "/x/b"}, true);
  EXPECT_TRUE(set.has_news());
  set.apply_news();
  EXPECT_EQ(set.find("a"), held);
  EXPECT_EQ(held->version.value, 2);
  EXPECT_EQ(held->num_updates, 1u);
  book.unload("a");
  EXPECT_FALSE(set.has("a"));
  EXPECT_EQ(code_of([&] { book.unload("a"); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { book.require("a"); }), ErrorCode::kNotFound);
}

}  // namespace
}  // namespace prl::server
