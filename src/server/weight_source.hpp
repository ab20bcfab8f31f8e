#pragma once

#include <filesystem>
#include <string>

namespace prl::server {

/// Where weights come from: one of both is set.
struct WeightSource {
  std::filesystem::path folder;  ///< of a Hugging Face checkpoint, or of an adapter in PEFT's format
  std::string store = {};        ///< "tcp://host:port" of a trainer that sends them (weights/collective_channel.hpp)
  /// For people.
  std::string describe() const { return store.empty() ? folder.string() : store; }
};

}  // namespace prl::server
