#include "engine/kv_desk.hpp"

#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "engine/core.hpp"

namespace prl::engine {
namespace {

/// The weights prove themselves for the first time, which takes a while where they are many.
constexpr std::chrono::minutes kLayoutTimeout{10};
constexpr std::chrono::milliseconds kNoWait{0};

/// The root of the prompt's blocks, if the engine computes with what `identity` says.
std::optional<BlockHash> root_of(EngineCore& core, const PromptKey& prompt, const KvIdentity& identity) {
  const bool is_unknown = !identity.adapter.empty() && identity.adapter_hash == 0;
  if (is_unknown || core.kv()->identity(identity.adapter) != identity) return std::nullopt;
  return core.kv()->root(prompt.cache_salt, identity.adapter);
}

}  // namespace

KvDesk::KvDesk(Engine& engine) : engine_(engine) {
  const nn::ModelConfig& model = engine.model_config();
  if (!model.linear.layers.empty())
    fail(ErrorCode::kNotImplemented, "a {} model has linear attention, whose states are not sent from engine to engine", model.model_type);
  struct Facts {
    std::string layout;
    std::int64_t block_size = 0;
    std::size_t block_bytes = 0;
  };
  // Shared with the engine's thread, which may still write to it when nobody waits any more; so it is below.
  const auto facts = std::make_shared<Facts>();
  engine_.visit("tell the layout of its blocks", kLayoutTimeout, [facts](EngineCore& core) {
    if (core.kv() == nullptr) fail(ErrorCode::kNotImplemented, "the engine has no host memory for key-value blocks");
    (void)core.kv()->identity("");
    *facts = {.layout = core.kv()->layout(),
              .block_size = core.kv()->exchange().block_size(),
              .block_bytes = core.kv()->exchange().block_bytes()};
  });
  layout_ = facts->layout;
  block_size_ = facts->block_size;
  block_bytes_ = facts->block_bytes;
}

KvDesk::Standing KvDesk::standing(PromptPtr prompt, const std::string& adapter, std::chrono::milliseconds timeout) {
  const auto standing = std::make_shared<Standing>();
  engine_.visit("look a prompt up", timeout, [standing, prompt, adapter](EngineCore& core) {
    standing->identity = core.kv()->identity(adapter);
    standing->num_cached = core.kv()->exchange().num_cached(core.kv()->root(prompt->cache_salt, adapter), *prompt);
    standing->num_useful = core.kv()->exchange().num_useful(*prompt);
  });
  return *standing;
}

void KvDesk::count_cached(PromptPtr prompt, const std::string& adapter, std::function<void(std::int64_t)> done) {
  engine_.visit("look a prompt up", kNoWait, [prompt, adapter, done = std::move(done)](EngineCore& core) {
    std::int64_t num = -1;
    try {
      num = core.kv()->exchange().num_cached(core.kv()->root(prompt->cache_salt, adapter), *prompt);
    } catch (const std::exception& error) {
      log::debug("a prompt was not looked up: {}", error.what());
    }
    done(num);
  });
}

std::vector<BlockParts> KvDesk::give(Key key, PromptPtr prompt, const KvIdentity& identity, std::int64_t first, std::int64_t max_blocks,
                                     std::chrono::milliseconds timeout) {
  const auto parts = std::make_shared<std::vector<BlockParts>>();
  engine_.visit("give blocks of a prompt", timeout, [=](EngineCore& core) {
    core.deliver();  // what a step in flight computes may still fail
    if (const auto root = root_of(core, *prompt, identity)) *parts = core.kv()->exchange().give(key, *root, *prompt, first, max_blocks);
  });
  return *parts;
}

std::vector<BlockParts> KvDesk::reserve(Key key, PromptPtr prompt, const KvIdentity& identity, std::int64_t first, std::int64_t max_blocks,
                                        std::chrono::milliseconds timeout) {
  const auto parts = std::make_shared<std::vector<BlockParts>>();
  engine_.visit("make room for blocks of a prompt", timeout, [=](EngineCore& core) {
    if (const auto root = root_of(core, *prompt, identity)) *parts = core.kv()->exchange().reserve(key, *root, *prompt, first, max_blocks);
  });
  return *parts;
}

std::int64_t KvDesk::publish(Key key, PromptPtr prompt, const std::string& adapter, std::int64_t num_good,
                             std::chrono::milliseconds timeout) {
  const auto num_found = std::make_shared<std::int64_t>(0);
  engine_.visit("take blocks of a prompt", timeout, [=](EngineCore& core) {
    *num_found = core.kv()->exchange().publish(key, core.kv()->root(prompt->cache_salt, adapter), *prompt, num_good);
  });
  return *num_found;
}

void KvDesk::end(Key key) noexcept {
  try {
    engine_.visit("let blocks of a prompt go", kNoWait, [key](EngineCore& core) { core.kv()->exchange().end(key); });
  } catch (const std::exception& error) {  // it has shut down, and its blocks with it
    log::debug("blocks of a prompt were not let go: {}", error.what());
  }
}

}  // namespace prl::engine
