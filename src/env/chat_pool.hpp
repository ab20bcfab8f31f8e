#pragma once

#include <memory>
#include <vector>

#include "env/chat_client.hpp"

namespace prl::env {

/// Several services of one model behind one factory: conversations go to them in turns, and each stays where it was opened, so
/// that prefix caches help. check_health asks all of them. Error{kInvalidArgument} for an empty list.
std::shared_ptr<ChatClientFactory> make_chat_pool(std::vector<std::shared_ptr<ChatClientFactory>> services);

}  // namespace prl::env
