#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include <cstring>
#include <fstream>

#include "base/base64.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/source_dir.hpp"
#include "base/testing/temp_folder.hpp"
#include "vision/image_processor.hpp"
#include "vision/prompt.hpp"
#include "vision/resample.hpp"

namespace prl::vision {
namespace {
namespace fs = std::filesystem;
using ::testing::HasSubstr;

fs::path golden_folder() { return test_source_dir() / "tests" / "golden" / "vision"; }

/// The bytes of tensors of expected.safetensors (tools/make_vision_golden.py).
class ExpectedTensors {
 public:
  ExpectedTensors() : bytes_(read_file(golden_folder() / "expected.safetensors")) {
    std::uint64_t size = 0;
    std::memcpy(&size, bytes_.data(), sizeof size);
    header_ = boost::json::parse(bytes_.substr(8, size)).as_object();
    data_ = 8 + size;
  }
  std::string_view of(const std::string& name) const {
    const auto& offsets = header_.at(name).as_object().at("data_offsets").as_array();
    const auto begin = static_cast<std::size_t>(offsets[0].to_number<std::int64_t>());
    return std::string_view(bytes_).substr(data_ + begin, static_cast<std::size_t>(offsets[1].to_number<std::int64_t>()) - begin);
  }

 private:
  std::string bytes_;
  boost::json::object header_;
  std::size_t data_ = 0;
};

std::string_view as_text(const std::vector<std::uint8_t>& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

template <typename Body>
void expect_refused(const Body& body, const std::string& said, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    body();
    ADD_FAILURE() << "no error, wanted: " << said;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(said));
  }
}

constexpr const char* kPictures[] = {"colours.png", "photo.jpg", "clear.png", "grey.png"};

TEST(VisionGolden, FilesAreDecodedAndComposedAsByPillow) {
  const ExpectedTensors expected;
  for (const std::string name : kPictures) {
    const Image image = decode_image(read_file(golden_folder() / name), {});
    EXPECT_TRUE(as_text(image.rgb) == expected.of("rgb." + name)) << name;
  }
}

TEST(VisionGolden, PicturesAreResizedAsByTorchvision) {
  const ExpectedTensors expected;
  for (const auto& [name, width, height] :
       {std::tuple("colours.png", 24, 40), {"colours.png", 96, 56}, {"colours.png", 5, 7}, {"photo.jpg", 64, 24}, {"photo.jpg", 17, 64}}) {
    const Image image = decode_image(read_file(golden_folder() / name), {});
    const Image resized = resize_bicubic(image, width, height);
    EXPECT_TRUE(as_text(resized.rgb) == expected.of(fmt::format("resized.{}.{}x{}", name, width, height))) << name << " " << width;
  }
}

TEST(VisionGolden, ProcessorsGiveTheNumbersOfTransformers) {
  const ExpectedTensors expected;
  const ImageProcessor processor = ImageProcessor::load(golden_folder());
  for (const std::string name : kPictures) {
    const auto pixels = processor.process(decode_image(read_file(golden_folder() / name), {}));
    ASSERT_TRUE(as_text(pixels->rgb) == expected.of("bytes." + name)) << name;
    std::array<std::int32_t, 3> grid{};
    std::memcpy(grid.data(), expected.of("grid." + name).data(), sizeof grid);
    const wire::PromptImage placed = processor.place(pixels, 7);
    EXPECT_EQ(placed.rows * 2, grid[1]) << name;
    EXPECT_EQ(placed.cols * 2, grid[2]) << name;
    EXPECT_EQ(placed.end(), 7 + grid[1] * grid[2] / 4);
    // The first row of the first patch's red.
    std::array<float, 4> values{};
    std::memcpy(values.data(), expected.of("pixels." + name).data(), sizeof values);
    for (std::size_t x = 0; x < 4; ++x)
      EXPECT_EQ((static_cast<float>(pixels->rgb[3 * x]) - pixels->mean[0]) / pixels->deviation[0], values[x]) << name;
  }
}

TEST(Vision, HashesTellPicturesAndNumbersApart) {
  const ImageProcessor processor = ImageProcessor::load(golden_folder());
  Image image{.width = 16, .height = 16, .rgb = std::vector<std::uint8_t>(16 * 16 * 3, 9)};
  const auto first = processor.process(image), again = processor.process(image);
  EXPECT_EQ(first->hash, again->hash);
  image.rgb[100] = 8;
  EXPECT_NE(processor.process(image)->hash, first->hash);
  ProcessorConfig other = processor.config();
  other.mean[1] += 1;
  image.rgb[100] = 9;
  EXPECT_NE(ImageProcessor(other).process(image)->hash, first->hash);
  Image wide{.width = 32, .height = 8, .rgb = image.rgb}, tall{.width = 8, .height = 32, .rgb = image.rgb};
  EXPECT_NE(processor.process(wide)->hash, processor.process(tall)->hash) << "the same bytes in another shape";
}

TEST(Vision, SmartResizeKeepsTheBounds) {
  EXPECT_EQ(smart_resize({100, 100}, 32, 65536, 16777216), (PictureSize{256, 256}));
  EXPECT_EQ(smart_resize({48, 80}, 32, 1, 1 << 24), (PictureSize{64, 64})) << "halves go to the even neighbour";
  EXPECT_EQ(smart_resize({4000, 6000}, 32, 65536, 1048576), (PictureSize{832, 1248}));
  expect_refused([] { smart_resize({1, 201}, 32, 1, 1 << 24); }, "at most 200 times");
}

TEST(Vision, DataUris) {
  const ImageLimits limits{.max_bytes = 100};
  EXPECT_EQ(bytes_of_data_uri("data:image/png;base64,aGVsbG8=", limits), "hello");
  expect_refused([&] { bytes_of_data_uri("https://example.org/a.png", limits); }, "makes no requests of its own");
  expect_refused([&] { bytes_of_data_uri("file:///etc/passwd", limits); }, "wanted a data: URI");
  expect_refused([&] { bytes_of_data_uri("data:image/gif;base64,aGVsbG8=", limits); }, "found 'data:image/gif;base64'");
  expect_refused([&] { bytes_of_data_uri("data:image/png,raw", limits); }, "found 'data:image/png'");
  expect_refused([&] { bytes_of_data_uri("data:image/png;base64,a*b=", limits); }, "");
  expect_refused([&] { bytes_of_data_uri("data:image/png;base64," + std::string(400, 'A'), limits); }, "at most 100");
}

/// Whatever is cut off or spoilt is refused, without a crash.
TEST(Vision, DamagedFilesAreRefused) {
  expect_refused([] { decode_image("GIF89a", {}); }, "neither PNG nor JPEG");
  expect_refused([] { decode_image("", {}); }, "neither PNG nor JPEG");
  for (const std::string name : kPictures) {
    const std::string whole = read_file(golden_folder() / name);
    for (const std::size_t part : {std::size_t{12}, whole.size() / 3, whole.size() / 2, whole.size() - 40})
      expect_refused([&] { decode_image(whole.substr(0, part), {}); }, name.ends_with("png") ? "PNG" : "JPEG");
    std::string spoilt = whole;
    for (std::size_t i = 20; i < spoilt.size(); i += 97) spoilt[i] = static_cast<char>(spoilt[i] ^ 0x55);
    try {
      decode_image(spoilt, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
  }
}

TEST(Vision, LimitsOfPicturesAreKept) {
  const std::string png = read_file(golden_folder() / "colours.png"), jpeg = read_file(golden_folder() / "photo.jpg");
  expect_refused([&] { decode_image(png, {.max_bytes = 100}); }, "at most 100");
  for (const std::string& file : {png, jpeg}) {
    expect_refused([&] { decode_image(file, {.max_pixels = 1000}); }, "at most 1000 pixels");
    EXPECT_NO_THROW(decode_image(file, {.max_pixels = 37 * 29}));
    expect_refused([&] { decode_image(file, {.max_side = 36}); }, "");
  }
}

TEST(Vision, ProcessorFilesSayWhatIsWrong) {
  const prl::testing::TempFolder folder;
  const auto load = [&](const std::string& text) {
    std::ofstream(folder.path() / "preprocessor_config.json") << text;
    return ImageProcessor::load(folder.path());
  };
  expect_refused([&] { ImageProcessor::load(folder.path()); }, "preprocessor_config.json: missing", ErrorCode::kNotFound);
  expect_refused([&] { load("[]"); }, "not a JSON object", ErrorCode::kCorrupt);
  expect_refused([&] { load(R"({"image_processor_type": "SiglipImageProcessor"})"); }, "image_processor_type", ErrorCode::kNotImplemented);
  expect_refused([&] { load(R"({"patch_size": "16"})"); }, "key 'patch_size': wanted a number", ErrorCode::kCorrupt);
  expect_refused([&] { load(R"({"image_mean": [0.5]})"); }, "key 'image_mean': wanted three numbers", ErrorCode::kCorrupt);
  expect_refused([&] { load(R"({"do_rescale": false})"); }, "do_rescale", ErrorCode::kNotImplemented);
  expect_refused([&] { load(R"({"resample": 2})"); }, "resample", ErrorCode::kNotImplemented);
  expect_refused([&] { load(R"({"size": {"shortest_edge": 100, "longest_edge": 10}})"); }, "at most 10", ErrorCode::kCorrupt);
  const ProcessorConfig config = load(R"({"patch_size": 16, "min_pixels": 5, "size": {"longest_edge": 777}})").config();
  EXPECT_EQ(config.patch_size, 16);
  EXPECT_EQ(config.min_pixels, 5);
  EXPECT_EQ(config.max_pixels, 777);
}

/// Time, height and width as get_rope_index of transformers counts them.
TEST(Vision, RotaryPositionsAreThoseOfTransformers) {
  const ExpectedTensors expected;
  const auto ints = [&](const std::string& name) {
    const std::string_view bytes = expected.of(name);
    std::vector<std::int32_t> out(bytes.size() / 4);
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  };
  const std::vector<std::int32_t> ids = ints("ids"), positions = ints("positions");
  std::vector<wire::PromptImage> images;
  for (const std::string name : {"colours.png", "photo.jpg"}) {
    const std::vector<std::int32_t> grid = ints("grid." + name);
    const auto from = images.empty() ? ids.begin() : ids.begin() + images.back().end();
    images.push_back({.pixels = nullptr, .first = std::find(from, ids.end(), 261) - ids.begin(), .rows = grid[1] / 2, .cols = grid[2] / 2});
  }
  const std::size_t T = ids.size();
  for (std::size_t t = 0; t < T; ++t) {
    const auto at = wire::rope_position(images, static_cast<std::int64_t>(t));
    for (std::size_t axis = 0; axis < 3; ++axis) EXPECT_EQ(at[axis], positions[axis * T + t]) << "token " << t << ", axis " << axis;
  }
}

/// What goes to an engine in another process: the picture at its size as a PNG file, which is not brought to a size again.
TEST(Vision, PicturesAtTheirSizeComeBackFromPng) {
  const ImageProcessor processor(
      {.patch_size = 4, .merge_size = 2, .min_pixels = 256, .max_pixels = 1536, .mean = {1, 2, 3}, .deviation = {4, 5, 6}});
  Image noise{.width = 500, .height = 3, .rgb = {}};  // longer than any bound lets the other side be
  Rng rng(1);
  for (std::int64_t i = 0; i < 3 * noise.width * noise.height; ++i) noise.rgb.push_back(static_cast<std::uint8_t>(rng.next_below(256)));
  EXPECT_EQ(decode_image(encode_png(noise), {}).rgb, noise.rgb);
  const auto pixels = processor.process(noise);
  EXPECT_GT(pixels->width * pixels->height, 1536);
  const std::string uri = png_data_uri(encode_png({.width = pixels->width, .height = pixels->height, .rgb = pixels->rgb}));
  const auto taken = processor.take(decode_image(bytes_of_data_uri(uri, {}), {}));
  EXPECT_EQ(taken->rgb, pixels->rgb);
  EXPECT_EQ(taken->hash, pixels->hash);
  EXPECT_THROW(processor.take({.width = 12, .height = 8, .rgb = std::vector<std::uint8_t>(288)}), Error);
  EXPECT_THROW(processor.take({.width = 800, .height = 80, .rgb = std::vector<std::uint8_t>(192000)}), Error);
}

TEST(Vision, PlaceholdersAreWidenedAndFound) {
  const ImageProcessor processor({.patch_size = 4, .merge_size = 2});
  const auto picture = [&](std::int64_t width, std::int64_t height) {
    return processor.take(
        {.width = width, .height = height, .rgb = std::vector<std::uint8_t>(static_cast<std::size_t>(3 * width * height))});
  };
  const std::vector<PixelsPtr> pictures{picture(16, 8), picture(8, 24)};
  std::vector<std::int32_t> ids{1, 9, 2, 9};
  std::vector<char> marks{'a', 'b', 'c', 'd'};
  const std::vector<wire::PromptImage> placed = place_images(processor, 9, pictures, ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{1, 9, 9, 2, 9, 9, 9}));
  widen_at(std::span<const wire::PromptImage>(placed), marks);
  EXPECT_EQ(marks, (std::vector<char>{'a', 'b', 'b', 'c', 'd', 'd', 'd'}));
  const std::vector<wire::PromptImage> found = locate_images(processor, 9, pictures, ids);
  ASSERT_EQ(found.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(found[i].first, placed[i].first);
  ids.pop_back();
  EXPECT_THROW(locate_images(processor, 9, pictures, ids), Error);
  EXPECT_THROW(place_images(processor, 9, pictures, ids), Error) << "5 placeholders";
}

}  // namespace
}  // namespace prl::vision
