#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint_dir.hpp"
#include "tensor/tensor.hpp"
#include "weights/share.hpp"
#include "weights/version_feed.hpp"

namespace prl::weights {

/// One version on its way from the trainer. A transport uses what it needs: an in-process one hands over `handle`, one
/// through files calls `save`.
struct Publication {
  WeightManifest manifest;
  std::shared_ptr<const void> handle;  ///< the packed weights object of this process; opaque here
  std::function<void(const std::filesystem::path& folder)>
      save;                                ///< writes a Hugging Face checkpoint into a folder that does not exist yet
  std::function<Tensor()> flat;            ///< all values in the compute dtype, in one array that stays as it is (nn::flat_values)
  bool is_adapter = false;                 ///< `flat` gives the bytes of an adapter (nn::peft_image) in place of the model's values
  std::optional<ValueRanges> ranges = {};  ///< of which `flat` gives the values, while `others` have the rest; perhaps none. nullopt: all
  std::vector<Share> others = {};          ///< ranks of the trainer that send a part of them each (WeightServer)
};

/// Versioned weights from one trainer to engines: the trainer's end, which moves tensors, and a feed that says what there is. Versions
/// only grow; a receiver may skip some.
///
/// Threads  publish() from the trainer's thread; the others from any thread that may block.
class WeightChannel {
 public:
  virtual ~WeightChannel() = default;
  /// Makes a version visible to receivers, whole or not at all; a version that is there already with the same manifest stays as it
  /// is (the start of a resumed run). Error{kIo} (a full disk, say) leaves the former one in place.
  virtual void publish(Publication publication) = 0;
  /// The newest version that is whole, if any.
  virtual std::optional<PublishedWeights> latest() = 0;
  /// Follows what is published from now on, and what is the newest already.
  virtual std::shared_ptr<VersionFeed> follow() = 0;
  /// One line for messages about waits: which transport, and where.
  virtual std::string describe() const = 0;
};

/// Trainer and engine in one process: a publication is a pointer.
std::shared_ptr<WeightChannel> make_local_channel();

struct FileChannelOptions {
  std::filesystem::path folder;               ///< <run>/broadcasts
  std::int64_t keep_versions = 2;             ///< newest versions that stay; engines may still be reading the one before
  std::optional<std::int64_t> keep_interval;  ///< multiples of it (the checkpoint interval) stay as `retention` says, by itself for good
  io::CheckpointRetention retention = {};
  std::chrono::milliseconds poll{50};
};
/// <folder>/step_K/: the checkpoint, manifest.json, and last of all an empty STABLE. Readers look only at folders that hold
/// STABLE, so a trainer killed half-way leaves nothing that is ever loaded.
std::shared_ptr<WeightChannel> make_file_channel(FileChannelOptions options);

/// Removes versions above `step` (all, with -1) that an earlier run left, so that no engine takes them for new ones.
void remove_broadcasts_after(const std::filesystem::path& folder, std::int64_t step);
/// Removes `step` and what is older, which nobody needs any more.
void remove_broadcasts_until(const std::filesystem::path& folder, std::int64_t step);

}  // namespace prl::weights
