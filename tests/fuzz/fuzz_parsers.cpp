// Feeds the parsers of outside bytes with damaged inputs. Each must end in a value or in one of the errors that callers expect;
// anything else (another exception, a crash, a sanitizer's report) fails, and the input is kept.
//
//   fuzz_parsers --corpus FOLDER [--target NAME] [--rounds N | --seconds N] [--seed N]
#include <boost/json/object.hpp>

#include <fmt/core.h>

#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "config/text_format.hpp"
#include "grammar/rule_cache.hpp"
#include "io/gguf.hpp"
#include "io/safetensors.hpp"
#include "mutator.hpp"
#include "net/http_message.hpp"
#include "net/sse.hpp"
#include "server/json_fields.hpp"
#include "server/structured_output.hpp"
#include "text/jinja.hpp"
#include "text/json_python.hpp"
#include "text/tokenizer.hpp"
#include "vision/image.hpp"

namespace prl::fuzz {
namespace {

using Clock = std::chrono::steady_clock;
using Target = std::function<void(const std::string&)>;

class ScratchFile {
 public:
  ScratchFile() : path_(std::filesystem::temp_directory_path() / fmt::format("prl-fuzz-{}", ::getpid())) {}
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  const std::filesystem::path& write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;  // not atomic: the disk need not keep it
    return path_;
  }

 private:
  std::filesystem::path path_;
};

/// What a request may ask for, read as the server reads it, and compiled.
void read_request(const std::string& body) {
  static const std::shared_ptr<const text::Tokenizer> kTokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::parse(
      R"({"model":{"type":"BPE","vocab":{"a":0,"b":1,"\"":2,"{":3,"}":4,":":5,",":6,"1":7,"[":8,"]":9},"merges":[]},"added_tokens":[],"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},"decoder":{"type":"ByteLevel"}})"));
  grammar::RuleCache rules(kTokenizer);
  const boost::json::object members = server::parse_body(body);
  const server::JsonFields fields(members);
  fields.number("temperature", 0, 2);
  fields.integer("max_tokens", 1, 1000);
  fields.strings("stop", 64);
  fields.token_ids("stop_token_ids", 10);
  if (const auto output = server::read_structured_output(fields)) rules.get(output->key, output->emit);
}

std::map<std::string, Target> make_targets() {
  auto scratch = std::make_shared<ScratchFile>();
  return {
      {"gguf", [scratch](const std::string& bytes) { io::GgufFile::open(scratch->write(bytes)); }},
      {"image", [](const std::string& bytes) { vision::decode_image(bytes, {.max_pixels = 1 << 16}); }},
      {"safetensors", [scratch](const std::string& bytes) { io::SafetensorsFile::open(scratch->write(bytes)); }},
      {"tokenizer",
       [](const std::string& bytes) {
         const auto tokenizer = text::Tokenizer::parse(bytes);
         tokenizer.decode(tokenizer.encode("Hello wörld 123 <|im_end|>\n\t 😀"));
       }},
      {"jinja",
       [](const std::string& bytes) {
         static const boost::json::value kContext = text::parse_json(
             R"({"messages":[{"role":"user","content":"a b"},{"role":"assistant","content":"c","tool_calls":[{"function":{"name":"f","arguments":{"x":1}}}]}],"tools":null,"n":3,"bos_token":"<s>","add_generation_prompt":true})");
         text::JinjaTemplate(bytes).render(kContext.as_object(), [] { return std::time_t{0}; });
       }},
      {"toml", [](const std::string& bytes) { config::to_toml(config::parse_toml(bytes, "fuzz.toml")); }},
      {"request", read_request},
      {"sse",
       [](const std::string& bytes) {
         // Any cut of the bytes must give the same events.
         const auto events_of = [&](std::size_t step) {
           net::SseParser parser(1 << 12);
           std::string out;
           for (std::size_t at = 0; at < bytes.size(); at += step) {
             parser.feed(std::string_view(bytes).substr(at, step));
             while (auto event = parser.next()) out += event->event + '\0' + event->data + '\0' + event->id + '\1';
           }
           return out;
         };
         const std::string whole = events_of(bytes.size() + 1);
         if (whole != events_of(1) || whole != events_of(7)) throw std::logic_error("events depend on how the bytes were cut");
       }},
  };
}

/// False if the target did something that callers do not expect.
bool run_one(const std::string& name, const Target& target, const std::string& input) {
  const auto keep = [&] {
    const auto path =
        std::filesystem::temp_directory_path() / fmt::format("prl-fuzz-crash-{}-{:016x}", name, std::hash<std::string>()(input));
    write_file_atomic(path, input);
    return path.string();
  };
  const auto started = Clock::now();
  try {
    target(input);
  } catch (const net::HttpError&) {  // the client's mistake, answered
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInternal) {
      fmt::print(stderr, "{}: internal error: {} (input kept in {})\n", name, error.what(), keep());
      return false;
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: unexpected exception: {} (input kept in {})\n", name, error.what(), keep());
    return false;
  }
  if (const auto seconds = std::chrono::duration<double>(Clock::now() - started).count(); seconds > 20) {
    fmt::print(stderr, "{}: {:.1f} s for {} bytes (input kept in {})\n", name, seconds, input.size(), keep());
    return false;
  }
  return true;
}

int run(const std::map<std::string, std::string>& options) {
  const auto get = [&](const char* name, const char* fallback) { return options.count(name) ? options.at(name) : fallback; };
  const std::filesystem::path corpus = get("--corpus", "");
  const std::string only = get("--target", "");
  const std::int64_t rounds = std::stoll(get("--rounds", "1000"));
  const std::int64_t seconds = std::stoll(get("--seconds", "0"));
  int num_failures = 0;
  for (const auto& [name, target] : make_targets()) {
    if (!only.empty() && only != name) continue;
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(corpus / name)) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<std::string> inputs;
    for (const auto& path : paths) inputs.push_back(read_file(path));
    if (inputs.empty()) fail(ErrorCode::kNotFound, "{}: no inputs", (corpus / name).string());
    int num_bad = 0;
    for (const std::string& input : inputs) num_bad += run_one(name, target, input) ? 0 : 1;
    Mutator mutator(inputs, static_cast<std::uint64_t>(std::stoll(get("--seed", "1"))));
    const auto end = Clock::now() + std::chrono::seconds(seconds);
    std::int64_t count = 0;
    for (; num_bad < 10 && (seconds > 0 ? Clock::now() < end : count < rounds); ++count)
      num_bad += run_one(name, target, mutator.next()) ? 0 : 1;
    fmt::print("{:<12} {} inputs, {} damaged ones, {} bad\n", name, inputs.size(), count, num_bad);
    num_failures += num_bad;
  }
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace prl::fuzz

int main(int argc, char** argv) {
  std::map<std::string, std::string> options;
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i]] = argv[i + 1];
  try {
    return prl::fuzz::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "fuzz_parsers: {}\n", error.what());
    return 2;
  }
}
