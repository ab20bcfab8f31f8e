#include "server/adapter_book.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::server {
namespace {

[[noreturn]] void fail_unknown(const std::string& name) { fail(ErrorCode::kNotFound, "The lora adapter '{}' cannot be found.", name); }

}  // namespace

AdapterBook::AdapterBook(engine::AdapterSet& set, Loader loader, std::size_t max_in_memory)
    : set_(&set), loader_(std::move(loader)), max_in_memory_(max_in_memory) {}

void AdapterBook::load(const std::string& name, const WeightSource& source, bool may_replace, std::optional<PolicyVersion> said) {
  const std::lock_guard one_at_a_time(loading_);
  PolicyVersion version{1};
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(name);
    if (found != entries_.end() && !may_replace)
      fail(ErrorCode::kAlreadyExists, "The lora adapter '{}' has already been loaded. Set load_inplace to give it other weights.", name);
    if (found != entries_.end()) version = PolicyVersion{found->second.version.value + 1};
  }
  if (const std::int64_t step = parse_step_dir(source.folder.filename().string()); step >= 0) version = PolicyVersion{step};
  version = said.value_or(version);
  engine::AdapterWeights weights = loader_(name, source, version);
  const std::lock_guard lock(mutex_);
  set_->set(name, version, std::move(weights));
  entries_[name] = {source, version, ++num_uses_, true};
  make_room();
}

void AdapterBook::unload(const std::string& name) {
  const std::lock_guard one_at_a_time(loading_);
  const std::lock_guard lock(mutex_);
  if (entries_.erase(name) == 0) fail_unknown(name);
  set_->remove(name);
}

void AdapterBook::require(const std::string& name) {
  const auto touch = [&]() -> std::optional<Entry> {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(name);
    if (found == entries_.end()) fail_unknown(name);
    found->second.last_use = ++num_uses_;
    return found->second.is_in_memory ? std::nullopt : std::optional(found->second);
  };
  if (!touch()) return;
  const std::lock_guard one_at_a_time(loading_);
  const std::optional<Entry> missing = touch();  // perhaps somebody has read it meanwhile
  if (!missing) return;
  engine::AdapterWeights weights = loader_(name, missing->source, missing->version);
  const std::lock_guard lock(mutex_);
  set_->set(name, missing->version, std::move(weights));
  entries_.at(name).is_in_memory = true;
  make_room();
}

bool AdapterBook::knows(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(name);
}

std::vector<AdapterInfo> AdapterBook::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<AdapterInfo> out;
  for (const auto& [name, entry] : entries_) out.push_back({name, entry.source, entry.version});
  return out;
}

void AdapterBook::make_room() {
  std::vector<std::pair<const std::string, Entry>*> in_memory;
  for (auto& entry : entries_)
    if (entry.second.is_in_memory) in_memory.push_back(&entry);
  std::ranges::sort(in_memory, {}, [](const auto* entry) { return entry->second.last_use; });
  for (std::size_t i = 0; i + max_in_memory_ < in_memory.size(); ++i) {
    set_->remove(in_memory[i]->first);
    in_memory[i]->second.is_in_memory = false;
  }
}

}  // namespace prl::server
