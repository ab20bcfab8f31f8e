// Two engines, one of which computes prompts for the other: the tokens and log-probabilities are those of one engine, whatever becomes of
// the blocks on their way. Compiled a second time for a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/adapter_set.hpp"
#include "engine/test_support.hpp"
#include "nn/decoder.hpp"
#include "nn/init_model.hpp"
#include "nn/peft.hpp"
#include "transfer/kv_gate.hpp"

namespace prl::transfer {
namespace {

using engine::testing::Inbox;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr std::int64_t kGateVocab = 300, kGateBlock = 16;
constexpr const char* kGateKey = "a key of this test";

class Gates : public ::testing::Test {
 protected:
  Gates() : session_(make_test_runtime(), 2) {
    config_ = nn::make_model_config({.family = "qwen3",
                                     .vocab_size = kGateVocab,
                                     .hidden_size = 64,
                                     .intermediate_size = 96,
                                     .num_layers = 2,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = 16,
                                     .max_position = 512});
  }
  nn::WeightsPtr weights(std::uint64_t seed, std::int64_t version) {
    nn::Parameters made(session_.context().runtime, config_);
    made.init_random(seed, 0.2f);
    return nn::make_weights(session_.context(), made, DType::kF32, PolicyVersion{version}, false, nullptr);
  }
  nn::AdapterPtr adapter(const nn::WeightsPtr& base, std::uint64_t seed) {
    nn::AdapterConfig wanted;
    wanted.rank = 4;
    wanted.alpha = 8;
    wanted.target_modules = {"q_proj", "v_proj"};
    nn::Parameters trained(session_.context().runtime, config_, nn::make_adapter_table(config_, wanted));
    nn::init_adapter(trained, seed);
    for (nn::NamedParameter& p : trained.named()) {
      if (nn::is_lora_a(p.block)) continue;
      const std::vector<float> values(static_cast<std::size_t>(p.num_elements()), 0.1f * static_cast<float>(seed));
      p.value.runtime()->copy_from_host(p.value.data(), values.data(), values.size() * sizeof(float));
    }
    session_.context().runtime->synchronize();
    return nn::adapt_weights(session_.context(), trained, wanted, DType::kF32, base, PolicyVersion{1})->adapter;
  }
  std::unique_ptr<engine::Engine> engine(const nn::WeightsPtr& weights, std::int64_t num_host_blocks = 64,
                                         std::int64_t block_size = kGateBlock) {
    engine::EngineOptions options;
    options.max_model_len = 320;
    options.block_size = block_size;
    options.num_blocks = 512 / block_size * 2;
    options.num_host_blocks = num_host_blocks;
    options.max_num_seqs = 8;
    options.num_threads = 1;
    options.adapters = std::make_shared<engine::AdapterSet>(2);
    return std::make_unique<engine::Engine>(session_.context().runtime, options, weights);
  }
  static KvGateOptions gate_options(std::chrono::milliseconds timeout = 20s) {
    KvGateOptions options{.server = {.key = kGateKey, .timeout = timeout}, .own_host = "127.0.0.1", .timeout = timeout};
    options.chunk_bytes = 3 * 2 * 2 * 2 * 16 * kGateBlock * sizeof(float);  // three blocks
    return options;
  }
  static std::vector<std::int32_t> gate_prompt(std::uint64_t seed, std::size_t length) {
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < length; ++i) ids.push_back(static_cast<std::int32_t>(mix_seed(seed, i) % kGateVocab));
    return ids;
  }
  static wire::GenerateOutput run(engine::Engine& engine, const std::vector<std::int32_t>& prompt, std::int32_t max_tokens = 6,
                                  std::uint64_t kv_key = 0, const std::string& adapter = {}) {
    wire::GenerateRequest request;
    request.prompt_ids = prompt;
    request.sampling.seed = 5;
    request.sampling.max_tokens = max_tokens;
    request.sampling.ignore_eos = true;
    request.kv_key = kv_key;
    Inbox inbox;
    engine.submit(
        std::move(request), [&](const engine::StepEvent& event) { inbox.push(event); }, adapter);
    return inbox.wait().output;
  }
  static void expect_same(const wire::GenerateOutput& a, const wire::GenerateOutput& b) {
    EXPECT_EQ(a.token_ids, b.token_ids);
    ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
    for (std::size_t i = 0; i < a.logprobs.size(); ++i)
      EXPECT_EQ(std::bit_cast<std::uint32_t>(a.logprobs[i]), std::bit_cast<std::uint32_t>(b.logprobs[i])) << i;
  }
  static engine::PromptPtr key_of(const std::vector<std::int32_t>& prompt) {
    return std::make_shared<engine::PromptKey>(engine::PromptKey{.tokens = prompt, .images = {}, .cache_salt = {}});
  }
  /// What `taker` does with the prompt when it is told that `place` has it.
  static wire::GenerateOutput run_with(engine::Engine& taker, KvGate& gate, const KvPlace& place, const std::vector<std::int32_t>& prompt) {
    const engine::KvDesk::Key key = gate.bring(key_of(prompt), "", place);
    const wire::GenerateOutput output = run(taker, prompt, 6, key);
    if (key != 0) gate.end(key);
    return output;
  }
  static std::int64_t uncached(KvGate& gate, const std::vector<std::int32_t>& prompt) {
    std::promise<std::int64_t> told;
    gate.find_uncached(key_of(prompt), "", [&](std::int64_t num) { told.set_value(num); });
    return told.get_future().get();
  }

  ops::OpSession session_;
  nn::ModelConfig config_;
};

TEST_F(Gates, BlocksOfAnotherEngineGiveTheBitsOfOne) {
  const nn::WeightsPtr shared = weights(1, 0);
  const auto giver = engine(shared), taker = engine(shared), alone = engine(shared);
  KvGate from(*giver, gate_options()), to(*taker, gate_options());
  const auto prompt = gate_prompt(1, 200);
  EXPECT_EQ(uncached(to, prompt), 200);
  run(*giver, prompt, 1);
  const wire::GenerateOutput output = run_with(*taker, to, from.own_place(), prompt);
  expect_same(output, run(*alone, prompt));
  EXPECT_EQ(output.num_cached_tokens, 199 / kGateBlock * kGateBlock) << "what came was not used";
  KvGateStats stats = to.stats();
  EXPECT_EQ(stats.num_transfers, 1);
  EXPECT_EQ(stats.num_fallbacks, 0);
  EXPECT_EQ(stats.num_blocks, 199 / kGateBlock);
  EXPECT_EQ(from.stats().num_blocks_given, stats.num_blocks);
  EXPECT_EQ(uncached(to, prompt), 200 - 200 / kGateBlock * kGateBlock + (200 % kGateBlock == 0 ? kGateBlock : 0));
  // What is there is not brought again; of a longer prompt the rest comes.
  EXPECT_EQ(to.bring(key_of(prompt), "", from.own_place()), 0u);
  auto longer = prompt;
  for (const std::int32_t id : gate_prompt(2, 100)) longer.push_back(id);
  run(*giver, longer, 1);
  expect_same(run_with(*taker, to, from.own_place(), longer), run(*alone, longer));
  EXPECT_EQ(to.stats().num_blocks, stats.num_blocks + 299 / kGateBlock - 200 / kGateBlock);
}

TEST_F(Gates, BlocksOfOtherWeightsAreNeverTaken) {
  const nn::WeightsPtr first = weights(1, 0), second = weights(2, 1), impostor = weights(3, 1);
  const auto giver = engine(first), taker = engine(first), alone = engine(second);
  KvGate from(*giver, gate_options()), to(*taker, gate_options());
  const auto prompt = gate_prompt(4, 150);
  run(*giver, prompt, 1);
  // The taker is a version ahead, then the giver has other weights that claim the same version.
  taker->update_weights(second, 20s);
  expect_same(run_with(*taker, to, from.own_place(), prompt), run(*alone, prompt));
  EXPECT_EQ(to.stats().num_blocks, 0);
  EXPECT_EQ(to.stats().num_fallbacks, 1);
  giver->update_weights(impostor, 20s);
  const auto other = gate_prompt(5, 150);
  run(*giver, other, 1);
  expect_same(run_with(*taker, to, from.own_place(), other), run(*alone, other));
  EXPECT_EQ(to.stats().num_blocks, 0);
  // Both have the new ones.
  giver->update_weights(second, 20s);
  const auto third = gate_prompt(6, 150);
  run(*giver, third, 1);
  expect_same(run_with(*taker, to, from.own_place(), third), run(*alone, third));
  EXPECT_EQ(to.stats().num_blocks, 149 / kGateBlock);
}

TEST_F(Gates, BlocksOfAnAdapterAreForTheSameAdapterAlone) {
  const nn::WeightsPtr base = weights(1, 0);
  const nn::AdapterPtr first = adapter(base, 1), second = adapter(base, 2);
  const auto giver = engine(base), taker = engine(base), alone = engine(base);
  KvGate from(*giver, gate_options()), to(*taker, gate_options());
  const auto give_all = [&](const nn::AdapterPtr& weights, std::uint64_t hash, const std::vector<engine::Engine*>& engines) {
    for (engine::Engine* e : engines) e->adapters().set("alpha", PolicyVersion{1}, {weights, nullptr, hash});
  };
  std::uint64_t seed = 60;
  /// Blocks that come of a prompt of "alpha" that the giver has computed.
  const auto num_come = [&] {
    const auto prompt = gate_prompt(++seed, 150);
    run(*giver, prompt, 1, 0, "alpha");
    const std::int64_t before = to.stats().num_blocks;
    const engine::KvDesk::Key key = to.bring(key_of(prompt), "alpha", from.own_place());
    expect_same(run(*taker, prompt, 6, key, "alpha"), run(*alone, prompt, 6, 0, "alpha"));
    if (key != 0) to.end(key);
    return to.stats().num_blocks - before;
  };
  give_all(first, 11, {giver.get(), taker.get(), alone.get()});
  EXPECT_EQ(num_come(), 149 / kGateBlock);
  give_all(second, 12, {taker.get(), alone.get()});  // the giver is late
  EXPECT_EQ(num_come(), 0);
  give_all(second, 12, {giver.get()});
  EXPECT_EQ(num_come(), 149 / kGateBlock);
  give_all(second, 0, {giver.get(), taker.get()});  // of weights that nobody knows
  EXPECT_EQ(num_come(), 0);
  // Without the adapter a prompt has other blocks.
  const auto prompt = gate_prompt(seed, 150);
  EXPECT_EQ(uncached(to, prompt), 150);
}

TEST_F(Gates, HostMemoryThatIsShortBringsWhatItHasRoomFor) {
  const nn::WeightsPtr shared = weights(1, 0);
  const auto giver = engine(shared), taker = engine(shared, 4), alone = engine(shared);
  KvGate from(*giver, gate_options()), to(*taker, gate_options());
  const auto prompt = gate_prompt(7, 220);
  run(*giver, prompt, 1);
  const wire::GenerateOutput output = run_with(*taker, to, from.own_place(), prompt);
  expect_same(output, run(*alone, prompt));
  EXPECT_EQ(output.num_cached_tokens, 4 * kGateBlock);
  EXPECT_EQ(to.stats().num_fallbacks, 1);
}

TEST_F(Gates, EnginesThatDoNotAgreeExchangeNothing) {
  const nn::WeightsPtr shared = weights(1, 0);
  const auto giver = engine(shared), taker = engine(shared, 64, 32), alone = engine(shared);
  KvGate from(*giver, gate_options()), to(*taker, gate_options());
  const auto prompt = gate_prompt(8, 150);
  run(*giver, prompt, 1);
  expect_same(run_with(*taker, to, from.own_place(), prompt), run(*alone, prompt));
  EXPECT_EQ(to.stats().num_fallbacks, 1) << "blocks of another size were taken";
  KvGateOptions stranger = gate_options();
  stranger.server.key = "another key";
  KvGate strange(*giver, stranger);
  try {
    (void)to.bring(key_of(prompt), "", strange.own_place());
    FAIL() << "a place that another key signed was asked";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnauthorized);
  }
  // One that signs with the right key and does not know it otherwise is found out when hands are shaken.
  KvPlace place{.host = "127.0.0.1", .port = strange.port(), .signature = {}};
  place.signature = keyed_hash(kGateKey, fmt::format("place127.0.0.1:{}", strange.port()));
  expect_same(run_with(*taker, to, place, gate_prompt(9, 100)), run(*alone, gate_prompt(9, 100)));
  EXPECT_EQ(strange.stats().num_blocks_given, 0);
}

/// An engine's side of the conversation that goes wrong in some way.
class FaultyGiver {
 public:
  using Script = std::function<void(Socket&, const Ask&)>;
  FaultyGiver(std::string layout, Script script)
      : listener_("127.0.0.1", 0), thread_([this, layout = std::move(layout), script = std::move(script)] { serve(layout, script); }) {}
  ~FaultyGiver() { thread_.join(); }
  KvPlace place() const {
    KvPlace place{.host = "127.0.0.1", .port = listener_.port(), .signature = {}};
    place.signature = keyed_hash(kGateKey, fmt::format("place127.0.0.1:{}", place.port));
    return place;
  }

 private:
  void serve(const std::string& layout, const Script& script) {
    const auto limit = Clock::now() + 20s;
    std::string peer;
    Fd fd = listener_.accept(limit, &peer);
    if (!fd.is_open()) return;
    Socket socket(std::move(fd), peer);
    try {
      const std::string nonce = make_nonce();
      send_frame(socket, FrameKind::kHello, nonce, limit);
      const std::string proof = receive_frame(socket, FrameKind::kProof, kMaxTextBytes, limit);
      EXPECT_EQ(proof.substr(64 + kNonceBytes), layout);
      send_frame(socket, FrameKind::kWelcome, keyed_hash(kGateKey, "giver" + proof.substr(64, kNonceBytes)), limit);
      script(socket, decode_ask(receive_frame(socket, FrameKind::kAsk, kMaxBodyBytes, limit)));
    } catch (const Error&) {  // the taker has had enough
    }
  }
  Listener listener_;
  std::thread thread_;
};

TEST_F(Gates, WhateverGoesWrongTheRequestHasItsTokens) {
  const nn::WeightsPtr shared = weights(1, 0);
  const auto alone = engine(shared);
  const std::size_t block_bytes = 2 * 2 * 2 * 16 * kGateBlock * sizeof(float);
  const auto limit = Clock::now() + 60s;
  const std::string noise(block_bytes, 'n');
  const auto send_block = [=](Socket& socket, const Ask& ask, std::int64_t at, std::size_t bytes) {
    const std::array parts{std::as_bytes(std::span(noise).first(bytes))};
    send_frame(socket, FrameKind::kBlock, parts, place_seeds(ask, kGateBlock, 4)[static_cast<std::size_t>(at)], limit);
  };
  const std::vector<std::pair<const char*, FaultyGiver::Script>> faults{
      {"it goes without an answer", [](Socket&, const Ask&) {}},
      {"it goes in the middle of a block",
       [=](Socket& socket, const Ask&) {
         send_frame(socket, FrameKind::kBlocks, encode_number(3), limit);
         socket.write(std::as_bytes(std::span("PKV1 and then nothing")), limit);
       }},
      {"a block is damaged",
       [=](Socket& socket, const Ask& ask) {
         send_frame(socket, FrameKind::kBlocks, encode_number(1), limit);
         const std::array parts{std::as_bytes(std::span(noise))};
         send_frame(socket, FrameKind::kBlock, parts, place_seeds(ask, kGateBlock, 1)[0] + 1, limit);
       }},
      {"blocks change places",
       [=](Socket& socket, const Ask& ask) {
         send_frame(socket, FrameKind::kBlocks, encode_number(2), limit);
         send_block(socket, ask, 1, noise.size());
         send_block(socket, ask, 0, noise.size());
       }},
      {"a block is too short",
       [=](Socket& socket, const Ask& ask) {
         send_frame(socket, FrameKind::kBlocks, encode_number(1), limit);
         send_block(socket, ask, 0, noise.size() - 8);
       }},
      {"more come than were asked for",
       [=](Socket& socket, const Ask& ask) {
         send_frame(socket, FrameKind::kBlocks, encode_number(static_cast<std::uint64_t>(ask.max_blocks) + 1), limit);
       }},
      {"it says something else", [=](Socket& socket, const Ask&) { send_frame(socket, FrameKind::kWelcome, "hello", limit); }},
      {"it refuses", [=](Socket& socket, const Ask&) { send_frame(socket, FrameKind::kRefusal, "not today", limit); }},
      {"it is silent", [](Socket& socket, const Ask&) { (void)socket.wait_readable(Clock::now() + 10s); }},
      {"it has none", [=](Socket& socket, const Ask&) { send_frame(socket, FrameKind::kBlocks, encode_number(0), limit); }},
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    const auto& [name, script] = faults[i];
    SCOPED_TRACE(name);
    const auto taker = engine(shared);
    KvGate to(*taker, gate_options(std::string_view(name) == "it is silent" ? 200ms : 20s));
    engine::KvDesk desk(*taker);
    const FaultyGiver giver(desk.layout(), script);
    const auto prompt = gate_prompt(20 + i, 130);
    expect_same(run_with(*taker, to, giver.place(), prompt), run(*alone, prompt));
    EXPECT_EQ(to.stats().num_fallbacks, 1);
    EXPECT_EQ(to.stats().num_blocks, 0);
    EXPECT_EQ(desk.standing(key_of(gate_prompt(90, 100)), "", 10s).num_cached, 0);
  }
  // Nobody is there at all.
  const auto taker = engine(shared);
  KvGate to(*taker, gate_options());
  KvPlace nowhere{.host = "127.0.0.1", .port = Listener("127.0.0.1", 0).port(), .signature = {}};
  nowhere.signature = keyed_hash(kGateKey, fmt::format("place127.0.0.1:{}", nowhere.port));
  ::testing::internal::CaptureStderr();
  for (const int seed : {40, 41}) {
    const auto prompt = gate_prompt(seed, 130);
    expect_same(run_with(*taker, to, nowhere, prompt), run(*alone, prompt));
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(to.stats().num_fallbacks, 2);
  EXPECT_THAT(said, HasSubstr("computed here"));
  EXPECT_EQ(said.find("computed here"), said.rfind("computed here")) << "told for each prompt: " << said;
}

TEST_F(Gates, TakersThatMisbehaveDisturbNobody) {
  const nn::WeightsPtr shared = weights(1, 0);
  const auto giver = engine(shared), taker = engine(shared), alone = engine(shared);
  KvGate from(*giver, gate_options()), to(*taker, gate_options());
  const engine::KvDesk desk(*taker);
  const auto limit = Clock::now() + 20s;
  const auto code_of = [&](const std::function<void()>& act) {
    try {
      act();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  const auto link_of = [&](const std::string& key, const std::string& layout) {
    return connect_tcp("127.0.0.1", from.port(), {.key = key, .layout = layout, .block_size = kGateBlock}, limit);
  };
  EXPECT_EQ(code_of([&] { (void)link_of("wrong", desk.layout()); }), ErrorCode::kUnavailable);
  EXPECT_EQ(code_of([&] { (void)link_of(kGateKey, "another layout"); }), ErrorCode::kUnavailable);
  {
    Socket socket = Socket::connect("127.0.0.1", from.port(), limit);
    (void)receive_frame(socket, FrameKind::kHello, kNonceBytes, limit);
    socket.write(std::as_bytes(std::span("GET / HTTP/1.1\r\nHost: here\r\n\r\n")), limit);
    EXPECT_EQ(code_of([&] { (void)receive_frame(socket, FrameKind::kWelcome, 64, limit); }), ErrorCode::kUnavailable);
  }
  const auto prompt = gate_prompt(50, 100);
  run(*giver, prompt, 1);
  expect_same(run_with(*taker, to, from.own_place(), prompt), run(*alone, prompt));
  EXPECT_EQ(to.stats().num_fallbacks, 0);
}

TEST_F(Gates, AModelWithStatesIsRefusedByName) {
  const nn::ModelConfig linear = nn::make_model_config({.family = "qwen3_next",
                                                        .vocab_size = kGateVocab,
                                                        .hidden_size = 64,
                                                        .intermediate_size = 96,
                                                        .num_layers = 4,
                                                        .num_heads = 4,
                                                        .num_kv_heads = 2,
                                                        .head_dim = 64,
                                                        .max_position = 512});
  nn::Parameters made(session_.context().runtime, linear);
  made.init_random(1, 0.1f);
  const auto states = engine(nn::make_weights(session_.context(), made, DType::kF32, PolicyVersion{0}, false, nullptr), 0);
  try {
    const KvGate gate(*states, gate_options());
    FAIL() << "its states were left behind";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotImplemented);
    EXPECT_THAT(error.what(), HasSubstr("qwen3_next model has linear attention"));
  }
}

TEST(Listener, APortThatIsTakenIsToldWithItsKey) {
  const Listener first("127.0.0.1", 0);
  try {
    const Listener second("127.0.0.1", first.port());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::StartsWith("kv_transfer.port: cannot listen on 127.0.0.1:")) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr("listens there")) << error.what();
  }
}

}  // namespace
}  // namespace prl::transfer
