#include "text/jinja.hpp"

#include "base/error.hpp"
#include "text/jinja/interpreter.hpp"
#include "text/jinja/parser.hpp"
#include "text/utf8.hpp"

namespace prl::text {

struct JinjaTemplate::Impl {
  jinja::NodeList body;
};

JinjaTemplate::JinjaTemplate(std::string_view source) {
  if (source.size() > kMaxSourceBytes)
    fail(ErrorCode::kInvalidArgument, "[chat template] has {} bytes, at most {} are accepted", source.size(), kMaxSourceBytes);
  impl_ = std::make_unique<const Impl>(Impl{jinja::parse_template(replace_invalid_utf8(source))});
}
JinjaTemplate::JinjaTemplate(JinjaTemplate&&) noexcept = default;
JinjaTemplate& JinjaTemplate::operator=(JinjaTemplate&&) noexcept = default;
JinjaTemplate::~JinjaTemplate() = default;

std::string JinjaTemplate::render(const boost::json::object& variables, const std::function<std::time_t()>& clock) const {
  std::vector<std::pair<std::string, jinja::Value>> values;
  for (const auto& member : variables)
    values.emplace_back(std::string(member.key().data(), member.key().size()), jinja::from_json(member.value()));
  jinja::Interpreter interpreter(
      jinja::Limits{}, clock ? clock : [] { return std::time(nullptr); });
  return interpreter.run(impl_->body, std::move(values));
}

}  // namespace prl::text
