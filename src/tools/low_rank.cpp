#include "tools/low_rank.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.hpp"

namespace prl::tools {
namespace {

constexpr std::int64_t kOversampling = 8;
constexpr int kNumPowerIterations = 4;
constexpr int kMaxSweeps = 60;
/// Columns whose length falls by so much when those before them are taken out are noise.
constexpr double kDependent = 1e-12;

/// Row-major, of doubles.
struct Matrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<double> values;
  Matrix(std::int64_t num_rows, std::int64_t num_cols)
      : rows(num_rows), cols(num_cols), values(static_cast<std::size_t>(num_rows * num_cols)) {}
  double* row(std::int64_t i) { return values.data() + i * cols; }
  const double* row(std::int64_t i) const { return values.data() + i * cols; }
};

struct Given {
  std::span<const float> values;
  std::int64_t rows, cols;
  const float* row(std::int64_t i) const { return values.data() + i * cols; }
};

/// d x [d.cols, q] -> [d.rows, q]
Matrix times(const Given& d, const Matrix& x, ThreadPool& pool) {
  Matrix out(d.rows, x.cols);
  pool.parallel_for(d.rows, [&](std::int64_t i) {
    for (std::int64_t k = 0; k < d.cols; ++k) {
      const double value = static_cast<double>(d.row(i)[k]);
      for (std::int64_t j = 0; j < x.cols; ++j) out.row(i)[j] += value * x.row(k)[j];
    }
  });
  return out;
}

/// d^T x [d.rows, q] -> [d.cols, q]
Matrix transposed_times(const Given& d, const Matrix& x, ThreadPool& pool) {
  constexpr std::int64_t kBlock = 64;
  Matrix out(d.cols, x.cols);
  pool.parallel_for((d.cols + kBlock - 1) / kBlock, [&](std::int64_t block) {
    const std::int64_t begin = block * kBlock, end = std::min(d.cols, begin + kBlock);
    for (std::int64_t i = 0; i < d.rows; ++i)
      for (std::int64_t k = begin; k < end; ++k) {
        const double value = static_cast<double>(d.row(i)[k]);
        for (std::int64_t j = 0; j < x.cols; ++j) out.row(k)[j] += value * x.row(i)[j];
      }
  });
  return out;
}

/// Gram-Schmidt over the columns, twice; columns that depend on those before them become zero.
void orthonormalize(Matrix& x) {
  for (std::int64_t j = 0; j < x.cols; ++j) {
    const auto length = [&] {
      double sum = 0;
      for (std::int64_t i = 0; i < x.rows; ++i) sum += x.row(i)[j] * x.row(i)[j];
      return std::sqrt(sum);
    };
    const double before = length();
    for (int pass = 0; pass < 2; ++pass)
      for (std::int64_t other = 0; other < j; ++other) {
        double dot = 0;
        for (std::int64_t i = 0; i < x.rows; ++i) dot += x.row(i)[other] * x.row(i)[j];
        for (std::int64_t i = 0; i < x.rows; ++i) x.row(i)[j] -= dot * x.row(i)[other];
      }
    const double after = length();
    const double factor = after > kDependent * before && after > 0 ? 1.0 / after : 0.0;
    for (std::int64_t i = 0; i < x.rows; ++i) x.row(i)[j] *= factor;
  }
}

/// Eigenvalues of a symmetric matrix, largest first, and its eigenvectors as columns, by Jacobi's rotations.
struct Eigen {
  std::vector<double> values;
  Matrix vectors;
};
Eigen symmetric_eigen(Matrix g) {
  const std::int64_t n = g.rows;
  Matrix v(n, n);
  for (std::int64_t i = 0; i < n; ++i) v.row(i)[i] = 1;
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    double off = 0, on = 0;
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < n; ++j) (i == j ? on : off) += g.row(i)[j] * g.row(i)[j];
    if (off <= 1e-30 * on || off == 0) break;
    for (std::int64_t p = 0; p < n; ++p)
      for (std::int64_t q = p + 1; q < n; ++q) {
        if (g.row(p)[q] == 0) continue;
        const double theta = (g.row(q)[q] - g.row(p)[p]) / (2 * g.row(p)[q]);
        const double t = (theta >= 0 ? 1.0 : -1.0) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        for (std::int64_t k = 0; k < n; ++k) {
          const double a = g.row(k)[p], b = g.row(k)[q];
          g.row(k)[p] = c * a - s * b;
          g.row(k)[q] = s * a + c * b;
        }
        for (std::int64_t k = 0; k < n; ++k) {
          const double a = g.row(p)[k], b = g.row(q)[k];
          g.row(p)[k] = c * a - s * b;
          g.row(q)[k] = s * a + c * b;
        }
        for (std::int64_t k = 0; k < n; ++k) {
          const double a = v.row(k)[p], b = v.row(k)[q];
          v.row(k)[p] = c * a - s * b;
          v.row(k)[q] = s * a + c * b;
        }
      }
  }
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, [&](std::int64_t a, std::int64_t b) { return g.row(a)[a] > g.row(b)[b]; });
  Eigen out{{}, Matrix(n, n)};
  for (std::int64_t j = 0; j < n; ++j) {
    const std::int64_t from = order[static_cast<std::size_t>(j)];
    out.values.push_back(std::max(0.0, g.row(from)[from]));
    for (std::int64_t i = 0; i < n; ++i) out.vectors.row(i)[j] = v.row(i)[from];
  }
  return out;
}

}  // namespace

LowRank best_low_rank(std::span<const float> matrix, std::int64_t rows, std::int64_t cols, std::int64_t rank, ThreadPool& pool) {
  const Given d{matrix, rows, cols};
  LowRank out;
  out.rank = std::min({rank, rows, cols});
  for (const float value : matrix) out.norm2 += static_cast<double>(value) * static_cast<double>(value);
  const std::int64_t num_columns = std::min({rank + kOversampling, rows, cols});
  Matrix z(cols, num_columns);
  Rng random(0x10a);
  for (double& value : z.values) value = random.next_normal();
  Matrix range = times(d, z, pool);
  orthonormalize(range);
  z = transposed_times(d, range, pool);
  for (int i = 0; i < kNumPowerIterations; ++i) {
    orthonormalize(z);
    range = times(d, z, pool);
    orthonormalize(range);
    z = transposed_times(d, range, pool);
  }
  // d is range z^T but for what the range misses; the eigenvectors of z^T z turn it into singular vectors.
  Matrix gram(num_columns, num_columns);
  for (std::int64_t k = 0; k < cols; ++k)
    for (std::int64_t i = 0; i < num_columns; ++i)
      for (std::int64_t j = 0; j < num_columns; ++j) gram.row(i)[j] += z.row(k)[i] * z.row(k)[j];
  const Eigen eigen = symmetric_eigen(std::move(gram));
  out.b.assign(static_cast<std::size_t>(rows * out.rank), 0.0f);
  out.a.assign(static_cast<std::size_t>(out.rank * cols), 0.0f);
  out.residual2 = out.norm2;
  for (std::int64_t r = 0; r < out.rank; ++r) {
    const double energy = eigen.values[static_cast<std::size_t>(r)];
    out.residual2 -= energy;
    if (energy <= 0) continue;
    const double share = std::sqrt(std::sqrt(energy));  // of the singular value, its root
    for (std::int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < num_columns; ++j) sum += range.row(i)[j] * eigen.vectors.row(j)[r];
      out.b[static_cast<std::size_t>(i * out.rank + r)] = static_cast<float>(sum * share);
    }
    for (std::int64_t k = 0; k < cols; ++k) {
      double sum = 0;
      for (std::int64_t j = 0; j < num_columns; ++j) sum += z.row(k)[j] * eigen.vectors.row(j)[r];
      out.a[static_cast<std::size_t>(r * cols + k)] = static_cast<float>(sum / share);
    }
  }
  out.residual2 = std::max(0.0, out.residual2);
  return out;
}

}  // namespace prl::tools
