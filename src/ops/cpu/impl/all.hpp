// Every body, in the order in which each needs the one before. No include guard: compiled once per instruction set.
// clang-format off
#include "ops/cpu/impl/math.hpp"
#include "ops/cpu/impl/micro.hpp"
#include "ops/cpu/impl/gemm.hpp"
#include "ops/cpu/impl/gemm_eight.hpp"
#include "ops/cpu/impl/rows.hpp"
#include "ops/cpu/impl/delta_rule.hpp"
#include "ops/cpu/impl/attention.hpp"
#include "ops/cpu/impl/attention_backward.hpp"
#include "ops/cpu/impl/table.hpp"
