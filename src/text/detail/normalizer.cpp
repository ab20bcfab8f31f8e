#include "text/detail/normalizer.hpp"

#include <numeric>

#include "base/error.hpp"
#include "text/detail/json_access.hpp"
#include "text/utf8.hpp"

namespace prl::text::detail {
namespace {

namespace json = boost::json;

constexpr int kMaxNormalizers = 8;

}  // namespace

void Normalizer::add(const json::value& config, const std::string& where, int depth) {
  if (depth > kMaxNormalizers) fail(ErrorCode::kCorrupt, "{}: normalizers nested deeper than {}", where, kMaxNormalizers);
  const json::object& object = as_object(config, where);
  const std::string_view type = as_string(require(object, "type", where), where + ".type");
  if (type == "Sequence") {
    const json::array& list = as_array(require(object, "normalizers", where), where + ".normalizers");
    for (std::size_t i = 0; i < list.size(); ++i) add(list[i], fmt::format("{}.normalizers[{}]", where, i), depth + 1);
  } else if (type == "NFC") {
    steps_.emplace_back(Nfc{});
  } else if (type == "Prepend") {
    steps_.emplace_back(Prepend{std::string(as_string(require(object, "prepend", where), where + ".prepend"))});
  } else if (type == "Replace") {
    steps_.emplace_back(Replacer(object, where));
  } else {
    fail(ErrorCode::kNotImplemented, "{}.type: normalizer '{}' is not supported, only NFC, Prepend, Replace and Sequence are", where, type);
  }
}

NormalText Normalizer::apply(std::string_view text, bool want_places) const {
  NormalText out{std::string(text), {}};
  if (want_places) {
    out.places.resize(text.size() + 1);
    std::iota(out.places.begin(), out.places.end(), 0u);
  }
  for (const Step& step : steps_) {
    if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (out.text.empty()) continue;
      out.text.insert(0, prepend->text);
      if (want_places) out.places.insert(out.places.begin(), prepend->text.size(), std::uint32_t{out.places.front()});
      continue;
    }
    std::vector<std::uint32_t> origin;
    std::vector<std::uint32_t>* wanted = want_places ? &origin : nullptr;
    const auto* replacer = std::get_if<Replacer>(&step);
    const auto size = static_cast<std::uint32_t>(out.text.size());
    out.text = replacer != nullptr ? replacer->apply(out.text, wanted) : to_nfc(out.text, wanted);
    if (!want_places) continue;
    // A mark that NFC brings to the front counts as the beginning, as upstream.
    if (replacer == nullptr && !origin.empty()) origin.front() = 0;
    origin.push_back(size);
    for (std::uint32_t& place : origin) place = out.places[place];
    out.places = std::move(origin);
  }
  return out;
}

}  // namespace prl::text::detail
