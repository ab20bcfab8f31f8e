#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "nn/models/family.hpp"

namespace prl::nn {
namespace {
const std::array<const Family*, 23> kFamilies{
    &kLlamaFamily,      &kQwen2Family,     &kQwen3Family,       &kQwen3MoeFamily,  &kGlm4MoeFamily,  &kMistralFamily,
    &kSmolLm3Family,    &kMixtralFamily,   &kOlmo2Family,       &kOlmo3Family,     &kPhi3Family,     &kQwen35Family,
    &kGptOssFamily,     &kQwen35MoeFamily, &kQwen3NextFamily,   &kMiniMaxM2Family, &kAfmoeFamily,    &kDeepseekV2Family,
    &kDeepseekV3Family, &kKimiK2Family,    &kGlm4MoeLiteFamily, &kGemma3Family,    &kNemotronHFamily};
}  // namespace

std::span<const Family* const> families() noexcept { return kFamilies; }

const Family& find_family(std::string_view model_type, std::string_view subject) {
  const auto it = std::find_if(kFamilies.begin(), kFamilies.end(), [&](const Family* f) { return f->model_type == model_type; });
  if (it != kFamilies.end()) return **it;
  std::string known;
  for (const Family* family : kFamilies) known += fmt::format("{}{}", known.empty() ? "" : ", ", family->model_type);
  fail(ErrorCode::kNotImplemented, "{}: key 'model_type' is '{}'; this build knows {}", subject, model_type, known);
}

void refuse_dropout(const ConfigReader& reader, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const double found = reader.number(key, 0.0, 0.0, 1.0); found != 0.0)
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}; this build trains without dropout and noise: 0 is wanted", reader.subject(),
           key, found);
}

}  // namespace prl::nn
