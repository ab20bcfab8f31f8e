#pragma once

#include <string>
#include <string_view>

namespace prl::text::detail {

/// The text of a tokenizer.json that gives the ids of a tiktoken vocabulary: `ranks` is the file tiktoken.model, a line for each token of
/// its bytes in base64 and its rank, which is its id; `config` is tokenizer_config.json, whose tokenizer_class says how text is split
/// first: "TikTokenTokenizer" (Moonlight, Kimi K2). Its added_tokens_decoder names special tokens; of the 256 ids behind the ranks the
/// others are
/// "<|reserved_token_N|>", as those models' own code has them. `name` is the folder, for errors.
/// Error{kCorrupt} names the line; Error{kNotImplemented} another tokenizer_class.
std::string tokenizer_json_of_ranks(std::string_view ranks, std::string_view config, std::string_view name);

}  // namespace prl::text::detail
