#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "rollouts/sample_queue.hpp"

namespace prl::rollouts {

/// Sample queue over a folder both sides see: <folder>/step_N/rank_R.bin, written under a temporary name, then renamed. Each file
/// carries a checksum: one that was damaged since is refused (kCorrupt), not trained on.
///
/// A taken file is renamed to rank_R.taken, so that a trainer restarted at an earlier step reads it again; the sender removes
/// taken files that are more than `keep_taken` steps old. A step that was taken already is not sent again with the same content: a sender
/// that goes on in another one's place may repeat its last step. <folder>/SENT holds the last step that was sent, so that a file that
/// somebody removed is an error and not a wait; <folder>/END holds it once the sender has closed.
struct FileSenderOptions {
  std::filesystem::path folder;  ///< <output_dir>/rollouts; made if missing
  std::int64_t num_ranks = 1;
  std::int64_t first_step = 1;  ///< first step that will be pushed; an END of an earlier run is removed
  std::int64_t capacity = 2;    ///< steps that may wait untaken
  std::int64_t keep_taken = 8;
};
std::unique_ptr<SampleSender> make_file_sender(FileSenderOptions options);

struct FileReceiverOptions {
  std::filesystem::path folder;
  std::int64_t rank = 0;
  std::int64_t first_step = 1;  ///< first step to take
};
std::unique_ptr<SampleReceiver> make_file_receiver(FileReceiverOptions options);

/// Removes SENT, END and the queue's files of all steps from `first_step` on: what an earlier run left behind. Call it before
/// either end is made. Other files of the step folders stay.
void clean_file_queue(const std::filesystem::path& folder, std::int64_t first_step);

}  // namespace prl::rollouts
