// Images in conversations and in tasks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "base/testing/source_dir.hpp"
#include "base/testing/temp_folder.hpp"
#include "env/testing/scripted_chat.hpp"
#include "env/token_chat_client.hpp"
#include "text/tokenizer_builder.hpp"
#include "vision/prompt.hpp"

namespace prl::env {
namespace {
using namespace testing;
using ::testing::HasSubstr;

class RecordedGenerate final : public GenerateClient {
 public:
  asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint) override {
    requests.push_back(std::move(request));
    wire::GenerateOutput output;
    output.token_ids = reply;
    output.logprobs.assign(reply.size(), -0.5f);
    output.finish_reason = wire::FinishReason::kStop;
    co_return output;
  }
  asio::awaitable<void> check_health(net::TimePoint) override { co_return; }
  std::string describe() const override { return "script"; }
  std::vector<std::int32_t> reply;
  std::vector<wire::GenerateRequest> requests;
};

class ChatWithImages : public ::testing::Test {
 protected:
  ChatWithImages() {
    text::write_byte_level_tokenizer(folder_.path(), {.more_special = {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>"}});
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_.path()));
    pad_ = *tokenizer_->id_of("<|image_pad|>");
    text::RendererOptions options{.name = "qwen3.5"};
    options.template_kwargs["enable_thinking"] = false;
    renderer_ = text::make_renderer(options, tokenizer_, nullptr);
    generate_->reply = tokenizer_->encode("C<|image_pad|><|im_end|>");
    images_ = std::make_shared<const vision::PromptImages>(vision::PromptImages::Options{
        .processor =
            std::make_shared<const vision::ImageProcessor>(vision::ImageProcessor::load(test_source_dir() / "tests" / "golden" / "vision")),
        .placeholder = pad_,
        .max_images = 3});
  }
  std::unique_ptr<ChatClient> open(bool takes_images = true, bool wants_roles = false) {
    TokenChatClientFactory factory(renderer_, generate_, takes_images ? images_ : nullptr);
    return factory.open({.session_id = "s", .cache_salt = "", .wants_roles = wants_roles});
  }
  static ChatTurn ask(ChatClient& client, json::array messages) {
    asio::io_context context;
    ChatRequest request;
    request.messages = std::move(messages);
    request.deadline = net::Clock::now() + std::chrono::seconds(5);
    auto asking = client.complete(request);
    auto future = asio::co_spawn(context, std::move(asking), asio::use_future);
    context.run();
    return future.get();
  }
  static Task task_of(const std::string& args) { return make("color-codeword", args)->task(Split::kTrain, 0); }

  prl::testing::TempFolder folder_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::int32_t pad_ = -1;
  std::shared_ptr<const text::Renderer> renderer_;
  std::shared_ptr<RecordedGenerate> generate_ = std::make_shared<RecordedGenerate>();
  std::shared_ptr<const vision::PromptImages> images_;
};

TEST_F(ChatWithImages, ImagesOfEarlierTurnsStay) {
  const auto client = open(true, /*wants_roles=*/true);
  json::array messages = task_of(R"({"image_size": 24, "images_per_turn": 2})").prompt;
  const ChatTurn first = ask(*client, messages);
  ASSERT_EQ(first.tokens.images.size(), 2u);
  for (const wire::PromptImage& image : first.tokens.images) {
    EXPECT_EQ(image.num_tokens(), 9);
    for (std::int64_t t = image.first; t < image.end(); ++t) EXPECT_EQ(first.tokens.prompt_ids[static_cast<std::size_t>(t)], pad_);
  }
  EXPECT_EQ(generate_->requests[0].images.size(), 2u);
  EXPECT_EQ(first.tokens.prompt_roles.size(), first.tokens.prompt_ids.size());
  messages.push_back(first.message);
  messages.push_back(task_of(R"({"image_size": 32, "system_prompt": null})").prompt[0]);
  const ChatTurn second = ask(*client, messages);
  EXPECT_TRUE(second.is_bridged);
  std::vector<std::int32_t> before = first.tokens.prompt_ids;
  before.insert(before.end(), generate_->reply.begin(), generate_->reply.end());
  ASSERT_GT(second.tokens.prompt_ids.size(), before.size());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), second.tokens.prompt_ids.begin())) << "a placeholder that was drawn is a token";
  ASSERT_EQ(second.tokens.images.size(), 3u);
  EXPECT_EQ(second.tokens.images[1].pixels, first.tokens.images[1].pixels) << "one copy";
  EXPECT_EQ(second.tokens.images[1].first, first.tokens.images[1].first);
  EXPECT_EQ(second.tokens.images[2].num_tokens(), 16);
  EXPECT_GT(second.tokens.images[2].first, static_cast<std::int64_t>(before.size()));
  for (std::int64_t t = second.tokens.images[2].first; t < second.tokens.images[2].end(); ++t)
    EXPECT_EQ(second.tokens.prompt_ids[static_cast<std::size_t>(t)], pad_);
  EXPECT_EQ(second.tokens.prompt_roles.size(), second.tokens.prompt_ids.size());
  messages.push_back(second.message);
  messages.push_back(messages[messages.size() - 2]);
  EXPECT_THROW(ask(*client, messages), Error) << "a fourth image";
}

TEST_F(ChatWithImages, WhatCannotBeReadIsNamed) {
  const auto said = [&](bool takes_images, const std::string& url) -> std::string {
    json::array parts{json::object{{"type", "image_url"}, {"image_url", json::object{{"url", url}}}}};
    try {
      ask(*open(takes_images), {json::object{{"role", "user"}, {"content", parts}}});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  const std::string good = vision::png_data_uri(vision::encode_png({.width = 8, .height = 8, .rgb = std::vector<std::uint8_t>(192, 7)}));
  EXPECT_EQ(said(true, good), "no error");
  EXPECT_THAT(said(false, good), HasSubstr("model.vlm is not set"));
  EXPECT_THAT(said(true, "https://example.org/a.png"), HasSubstr("messages[0].content[0]: an image of another host"));
  EXPECT_THAT(said(true, "data:image/png;base64,aGVsbG8="), HasSubstr("neither PNG nor JPEG"));
}

TEST(ColorCodeword, TheWholeCodewordIsTheAnswer) {
  const auto environment = make("color-codeword", R"({"num_turns": 2, "images_per_turn": 2, "num_colors": 4, "image_size": 8})");
  const Task task = environment->task(Split::kTrain, 3);
  ASSERT_EQ(task.answer.size(), 4u);
  ASSERT_EQ(task.prompt.size(), 2u);
  EXPECT_THAT(std::string(task.prompt[0].at("content").as_string()), HasSubstr("red is A, green is B, blue is C, yellow is D."));
  ScriptedChat chat({says("I see " + task.answer.substr(0, 2)), says("So it is " + task.answer + ", I think")});
  const Episode right = play(*environment, task, chat);
  EXPECT_EQ(right.reward, 1.0);
  EXPECT_EQ(right.num_turns(), 2);
  ASSERT_EQ(chat.requests.size(), 2u);
  // The squares have the colours of the codeword.
  constexpr std::array<std::array<std::uint8_t, 3>, 4> kRgb{{{255, 0, 0}, {0, 255, 0}, {0, 0, 255}, {255, 255, 0}}};
  std::size_t num_images = 0;
  vision::for_each_image(chat.requests[1].messages, [&](const json::object& part, const std::string&) {
    const vision::Image image = vision::decode_image(vision::bytes_of_data_uri(vision::uri_of_part(part), {}), {});
    EXPECT_EQ(image.width, 8);
    const auto& rgb = kRgb.at(static_cast<std::size_t>(task.answer[num_images++] - 'A'));
    for (std::size_t i = 0; i < image.rgb.size(); ++i) EXPECT_EQ(image.rgb[i], rgb[i % 3]);
  });
  EXPECT_EQ(num_images, 4u);
  std::string half_right = task.answer;
  half_right[3] = half_right[3] == 'A' ? 'B' : 'A';
  ScriptedChat wrong({says("?"), says(half_right)});
  const Episode almost = play(*environment, task, wrong);
  EXPECT_EQ(almost.reward, 0.0);
  EXPECT_EQ(almost.metrics.at("partial_match"), 0.75);
  ScriptedChat silent({says("a1B"), says("")});
  EXPECT_EQ(play(*environment, task, silent).metrics.at("partial_match"), 0.0);

  const json::array shown = *environment->demonstration(task);
  ASSERT_EQ(shown.size(), 3u);
  EXPECT_EQ(shown[0].at("content"), json::string(task.answer.substr(0, 2)));
  EXPECT_EQ(shown[2].at("content"), json::string(task.answer));
  EXPECT_EQ(environment->task(Split::kTrain, 3).answer, task.answer);
  std::set<std::string> answers;
  for (std::int64_t i = 0; i < 40; ++i) answers.insert(environment->task(Split::kTrain, i).answer);
  EXPECT_GT(answers.size(), 20u);
  EXPECT_THROW(make("color-codeword", R"({"num_colors": 10})"), Error);
}

}  // namespace
}  // namespace prl::env
