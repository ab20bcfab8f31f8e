#pragma once

#include <memory>

#include "config/tool_config.hpp"
#include "tools/chat.hpp"

namespace prl::tools {

/// The model loaded into an engine of this process. Error{kInvalidArgument} if it has no chat template.
std::unique_ptr<ChatBackend> make_local_chat(const config::ChatConfig& config);
/// Any OpenAI-compatible server, config.client, over streamed /chat/completions.
std::unique_ptr<ChatBackend> make_server_chat(const config::ChatConfig& config);

/// `prl chat`: backend by configuration, this process's terminal. Returns the exit status.
int run_chat(const config::ChatConfig& config);

}  // namespace prl::tools
