#pragma once

#include <memory>

#include "engine/engine.hpp"
#include "env/generate_client.hpp"
#include "text/tokenizer.hpp"

namespace prl::launch {

/// GenerateClient over an engine in the same process. Stop strings are matched here, as the HTTP server does for its clients.
std::unique_ptr<env::GenerateClient> make_engine_client(engine::Engine& engine, std::shared_ptr<const text::Tokenizer> tokenizer);

}  // namespace prl::launch
