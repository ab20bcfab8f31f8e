#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include <fstream>

#include "base/base64.hpp"
#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "base/testing/temp_folder.hpp"
#include "net/http_client.hpp"
#include "server/api_server.hpp"
#include "server/testing/scripted_backend.hpp"
#include "text/tokenizer_builder.hpp"
#include "vision/prompt.hpp"

namespace prl::server {
namespace {
namespace json = boost::json;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::ScriptedBackend;

/// As the templates of Qwen's models write images.
constexpr const char* kImageTemplate = R"({%- set image_count = namespace(value=0) %}
{%- macro render_content(content, do_vision_count, is_system_content=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system_content %}
                    {{- raise_exception('System message cannot contain images.') }}
                {%- endif %}
                {%- if do_vision_count %}
                    {%- set image_count.value = image_count.value + 1 %}
                {%- endif %}
                {%- if add_vision_id %}
                    {{- 'Picture ' ~ image_count.value ~ ': ' }}
                {%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + render_content(message.content, true, message.role == 'system') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %})";

class ServerImagesTest : public ::testing::Test {
 protected:
  ServerImagesTest() {
    ids_ = text::write_byte_level_tokenizer(
        folder_.path(), {.chat_template = kImageTemplate, .more_special = {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>"}});
    tokenizer_ = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(folder_.path()));
    pad_ = ids_.vocab_size - 1;
  }
  ~ServerImagesTest() override {
    server_.reset();
    backend_.reset();
  }
  void start(bool has_tower, std::int64_t max_model_len = 512) {
    ApiOptions options;
    options.port = 0;
    options.served_names = {"tiny"};
    if (has_tower) {
      options.images.processor = std::make_shared<vision::ImageProcessor>(vision::ImageProcessor::load(golden()));
      options.images.token_id = pad_;
      options.images.max_images = 3;
      options.images.limits.max_bytes = 4000;
    }
    ScriptedBackend::Options backend;
    backend.vocab_size = ids_.vocab_size;
    backend.end_id = ids_.im_end;
    backend.max_model_len = max_model_len;
    backend_ = std::make_unique<ScriptedBackend>(backend, [this](const wire::GenerateRequest&) { return tokenizer_->encode("Seen."); });
    auto chat = std::make_shared<const text::ChatTemplate>(text::ChatTemplate::load(folder_.path(), *tokenizer_));
    server_ = std::make_unique<ApiServer>(options, *backend_, tokenizer_, chat, nullptr);
    server_->start();
    net::HttpClient::Options client;
    client.timeout = 30s;
    client.max_retries = 0;
    client_ = std::make_unique<net::BlockingHttpClient>(client);
  }
  static std::filesystem::path golden() { return test_source_dir() / "tests" / "golden" / "vision"; }
  static std::string uri_of(const std::string& name) {
    return (name.ends_with("png") ? "data:image/png;base64," : "data:image/jpeg;base64,") + to_base64(read_file(golden() / name));
  }
  static json::object image_part(const std::string& uri) { return {{"type", "image_url"}, {"image_url", {{"url", uri}}}}; }
  static json::object text_part(const std::string& said) { return {{"type", "text"}, {"text", said}}; }
  static json::object body_of(json::array parts) {
    return {{"model", "tiny"}, {"messages", json::array{json::object{{"role", "user"}, {"content", std::move(parts)}}}}};
  }
  json::value post(const json::object& body, int wanted = 200, const std::string& route = "/v1/chat/completions") {
    net::HttpCall call;
    call.method = "POST";
    call.url = fmt::format("http://127.0.0.1:{}{}", server_->port(), route);
    call.body = json::serialize(body);
    const net::HttpReply reply = client_->call(call);
    EXPECT_EQ(reply.status, wanted) << reply.body;
    return json::parse(reply.body);
  }
  void expect_param(const json::object& body, const std::string& param, const std::string& said,
                    const std::string& route = "/v1/chat/completions") {
    const json::value reply = post(body, 400, route);
    EXPECT_EQ(reply.at("error").at("param"), json::string(param)) << json::serialize(reply);
    EXPECT_THAT(json::serialize(reply.at("error").at("message")), HasSubstr(said));
  }

  prl::testing::TempFolder folder_;
  text::ByteTokenizerIds ids_;
  std::int32_t pad_ = -1;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  std::unique_ptr<ScriptedBackend> backend_;
  std::unique_ptr<ApiServer> server_;
  std::unique_ptr<net::BlockingHttpClient> client_;
};

TEST_F(ServerImagesTest, PlaceholdersAreWidenedToTheTokensOfTheirImages) {
  start(true);
  const json::value reply = post(body_of(
      {text_part("What is "), image_part(uri_of("colours.png")), text_part(" beside "), image_part(uri_of("photo.jpg")), text_part("?")}));
  EXPECT_EQ(reply.at("choices").at(0).at("message").at("content"), "Seen.");
  const wire::GenerateRequest request = backend_->last_request();
  ASSERT_EQ(request.images.size(), 2u);
  EXPECT_EQ(reply.at("usage").at("prompt_tokens"), request.prompt_ids.size());
  const std::string before = "<|im_start|>user\nWhat is <|vision_start|>";
  EXPECT_EQ(request.images[0].first, static_cast<std::int64_t>(tokenizer_->encode(before).size()));
  EXPECT_EQ(request.images[0].rows * 8, request.images[0].pixels->height);
  EXPECT_EQ(request.images[1].cols * 8, request.images[1].pixels->width);
  // Without the placeholders it is the rendered text.
  std::vector<std::int32_t> rest;
  for (std::size_t i = 0; i < request.prompt_ids.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const bool is_within = std::ranges::any_of(request.images, [&](const auto& image) { return at >= image.first && at < image.end(); });
    EXPECT_EQ(request.prompt_ids[i] == pad_, is_within) << i;
    if (!is_within) rest.push_back(request.prompt_ids[i]);
  }
  EXPECT_EQ(rest, tokenizer_->encode(before + "<|vision_end|> beside <|vision_start|><|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"));
  const json::value tokens = post(body_of({image_part(uri_of("grey.png"))}), 200, "/tokenize");
  EXPECT_GT(tokens.at("count").to_number<int>(), 10) << "the tokens that a prompt has";
}

TEST_F(ServerImagesTest, SeveralChoicesShareTheImages) {
  start(true);
  json::object body = body_of({image_part(uri_of("grey.png")), text_part("?")});
  body["n"] = 2;
  EXPECT_EQ(post(body).at("choices").as_array().size(), 2u);
  EXPECT_EQ(backend_->last_request().images.size(), 1u);
}

TEST_F(ServerImagesTest, WrongImagesAreA400ThatNamesThePart) {
  start(true);
  const std::string second = "messages[0].content[1].image_url";
  const auto with = [](const std::string& uri) { return body_of({text_part("Look: "), image_part(uri)}); };
  expect_param(with("https://example.org/cat.png"), second, "makes no requests of its own");
  expect_param(with("cat.png"), second, "wanted a data: URI");
  expect_param(with("data:image/png;base64,aGVsbG8="), second, "neither PNG nor JPEG");
  expect_param(with("data:image/png;base64," + std::string(8000, 'A')), second, "at most 4000");
  expect_param(with(uri_of("photo.jpg").substr(0, 1001)), second, "");
  expect_param(body_of({text_part("a"), json::object{{"type", "image_url"}, {"image_url", json::object{}}}}), second, "'url'");
  json::array many;
  for (int i = 0; i < 4; ++i) many.push_back(image_part(uri_of("grey.png")));
  expect_param(body_of(many), "messages[0].content[3].image_url", "more than 3 images");
  expect_param(body_of({text_part("<|image_pad|>"), image_part(uri_of("grey.png"))}), "messages", "1 images and 2 placeholders");
  json::object system = body_of({image_part(uri_of("grey.png"))});
  system["messages"].as_array()[0].as_object()["role"] = "system";
  expect_param(system, "messages", "System message cannot contain images");
  json::object cut = body_of({image_part(uri_of("grey.png"))});
  cut["truncate_prompt_tokens"] = 10;
  expect_param(cut, "truncate_prompt_tokens", "is not cut");
  json::object tokens = body_of({image_part(uri_of("grey.png"))});
  tokens["tokens"] = json::array{1, 2, 3};
  expect_param(tokens, "tokens", "no 6 placeholders in a row", "/v1/chat/completions/tokens");
  EXPECT_EQ(post(body_of({text_part("still here")})).at("choices").at(0).at("message").at("content"), "Seen.");
}

TEST_F(ServerImagesTest, ImagesThatOverflowTheContextAreToldSo) {
  start(true, 40);
  const json::value reply = post(body_of({image_part(uri_of("colours.png")), text_part("?")}), 400);
  EXPECT_THAT(json::serialize(reply), HasSubstr("maximum context length is 40 tokens"));
}

TEST_F(ServerImagesTest, PromptsOfTokensTakePicturesAtTheirSize) {
  start(true);
  post(body_of({text_part("What is "), image_part(uri_of("colours.png")), text_part(" or "), image_part(uri_of("grey.png"))}));
  const wire::GenerateRequest of_messages = backend_->last_request();
  json::array places, hashes, data;
  for (const wire::PromptImage& image : of_messages.images) {
    const wire::ImagePixels& p = *image.pixels;
    places.push_back(json::object{{"offset", image.first}, {"length", image.num_tokens()}});
    hashes.emplace_back(vision::hash_text(p));
    data.emplace_back(vision::png_data_uri(vision::encode_png({.width = p.width, .height = p.height, .rgb = p.rgb})));
  }
  json::object body{{"token_ids", json::array(of_messages.prompt_ids.begin(), of_messages.prompt_ids.end())},
                    {"sampling_params", json::object{{"max_tokens", 4}}},
                    {"features", json::object{{"mm_placeholders", json::object{{"image", places}}},
                                              {"mm_hashes", json::object{{"image", hashes}}},
                                              {"kwargs_data", json::object{{"image", data}}}}}};
  const std::string route = "/inference/v1/generate";
  post(body, 200, route);
  const wire::GenerateRequest of_tokens = backend_->last_request();
  ASSERT_EQ(of_tokens.images.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(of_tokens.images[i].first, of_messages.images[i].first);
    EXPECT_EQ(of_tokens.images[i].pixels->rgb, of_messages.images[i].pixels->rgb);
    EXPECT_EQ(of_tokens.images[i].pixels->hash, of_messages.images[i].pixels->hash);
  }
  const auto refused = [&](const char* member, std::size_t at, const json::value& value, const std::string& param, const std::string& why) {
    json::object bad = body;
    bad["features"].as_object()[member].as_object()["image"].as_array().at(at) = value;
    expect_param(bad, param, why, route);
  };
  refused("mm_hashes", 1, hashes[0], "features.mm_hashes.image[1]", "hashes to");
  refused("mm_placeholders", 0, places[1], "features.mm_placeholders.image[0]", "the picture has");
  refused("mm_placeholders", 1, json::object{{"offset", 3}}, "features.mm_placeholders.image[1]", "{offset, length}");
  refused("kwargs_data", 0, "tensors", "features.kwargs_data.image[0]", "wanted a data: URI");
  refused("kwargs_data", 0, nullptr, "features.kwargs_data.image[0]", "tensors are not read");
  refused("kwargs_data", 0, json::string(uri_of("photo.jpg")), "features.kwargs_data.image[0]", "multiples of 8");
  json::object bad = body;
  bad["features"].as_object()["mm_hashes"].as_object()["image"].as_array().pop_back();
  expect_param(bad, "features.mm_hashes.image", "1 entries for 2 images", route);
  bad = body;
  bad["token_ids"].as_array()[static_cast<std::size_t>(of_messages.images[0].first)] = 5;
  expect_param(bad, "features.mm_placeholders.image[0]", "is no placeholder", route);
  // The route of chats takes them with the messages.
  json::object chat =
      body_of({text_part("What is "), image_part(uri_of("colours.png")), text_part(" or "), image_part(uri_of("grey.png"))});
  chat["tokens"] = body["token_ids"];
  post(chat, 200, "/v1/chat/completions/tokens");
  ASSERT_EQ(backend_->last_request().images.size(), 2u);
  EXPECT_EQ(backend_->last_request().images[1].first, of_messages.images[1].first);
}

TEST_F(ServerImagesTest, ModelsWithoutATowerSaySo) {
  start(false);
  expect_param(body_of({image_part(uri_of("grey.png"))}), "messages[0].content[0].image_url", "this model has no vision tower");
  EXPECT_EQ(post(body_of({text_part("text")})).at("choices").at(0).at("message").at("content"), "Seen.");
}

}  // namespace
}  // namespace prl::server
