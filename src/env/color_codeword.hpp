#pragma once

#include <string>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// Multi-turn, with images: each turn shows plain squares, drawn as PNG files, whose colours stand for letters (red is A, green B, and so
/// on, as the system prompt says); the model answers with the codeword of all squares so far, and the last answer is scored.
///
/// reward = exact_match (1 if the last answer's codeword is that of all squares). Metric partial_match: the share of letters in place. The
/// codeword of an answer is its last word of as many capital letters as there are squares, whatever stands around it.
/// Demonstrations answer each turn with the codeword so far.
///
/// Args: num_train 1000, num_eval 100 tasks (of both splits drawn from `seed`, apart), seed 42, num_turns 3, images_per_turn 1,
/// num_colors 9 (the first so many of red, green, blue, yellow, purple, cyan, orange, white, black), image_size 64 pixels, system_prompt.
/// For models that take images.
/// Source: the task of the same name of the verifiers repository; tasks are drawn by another generator and differ from its.
EnvironmentPtr make_color_codeword(std::string name, Args args);

}  // namespace prl::env
