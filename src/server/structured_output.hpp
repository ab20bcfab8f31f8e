#pragma once

#include <memory>
#include <optional>
#include <string>

#include "grammar/rule_cache.hpp"
#include "server/json_fields.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer.hpp"
#include "wire/token_rule.hpp"

namespace prl::server {

struct PreparedRequest;
struct ServerContext;

/// What form the text of a reply must have.
struct StructuredOutput {
  std::string param;  ///< the member that asked for it, for errors
  std::string key;    ///< the same for all requests that ask for the same
  grammar::RuleCache::Emit emit;
  bool is_call = false;  ///< calls have a place of their own in the channels of gpt-oss
};

/// Where reasoning may stand before the text: a think block, or the analysis channel.
enum class Thinking {
  kNone,
  kMaybe,  ///< the reply may open it
  kOpen,   ///< the prompt has opened it
};

/// Reads response_format (text, json_object, json_schema), structured_outputs (json, json_object, regex, choice, grammar) and the older
/// guided_json, guided_regex, guided_choice, guided_grammar. nullopt when none is there. 400 for two of them or a wrong one, 501 for
/// structural tags.
std::optional<StructuredOutput> read_structured_output(const JsonFields& fields);
/// Reads tool_choice: a form for "required" and a named function, nullopt for "auto" and "none"; "none" turns parsing of calls
/// off in `request`, a form turns it on. 501 if calls of this model are not written in the form that can be enforced.
std::optional<StructuredOutput> read_tool_choice(const JsonFields& fields, const ServerContext& context, PreparedRequest& request);
/// The rule if it was made before, else null.
std::shared_ptr<const wire::TokenRule> find_token_rule(const ServerContext& context, const StructuredOutput& output, Thinking thinking);
/// The rule over this model's tokens. Slow the first time. 400 naming the member if the form cannot be enforced.
std::shared_ptr<const wire::TokenRule> make_token_rule(const ServerContext& context, const StructuredOutput& output, Thinking thinking);

}  // namespace prl::server
