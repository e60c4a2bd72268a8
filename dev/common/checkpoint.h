// checkpoint.h - safetensors files: eight bytes with the length of a JSON header, the header, the data.
//
//   {"__metadata__":{"step":"500", ...},
//    "model.wte":{"dtype":"F32","shape":[384,128],"data_offsets":[0,196608]}, ...}
//
// A checkpoint's tensors are named model.<name>, adam_m.<name> and adam_v.<name> after the table in config.h.
// Its metadata are strings: settings by the names of their flags, step, tokens, format_version, checksum. The
// whole file is checked before a tensor is read, so a bad file never half-loads. Tensors are read and written
// in chunks: a model may be larger than the memory left.
#pragma once
#include <algorithm>
#include <cinttypes>
#include <functional>
#include <map>

#include "dev/common/errors.h"  // fatal, checked_mul
#include "dev/common/files.h"   // InFile, OutFile
#include "dev/common/flags.h"   // flag_table: names of the sizes
#include "dev/common/ranks.h"   // ranks
#include "dev/common/text.h"    // Json, json_quote

using Metadata = std::map<std::string, std::string>;

constexpr size_t CHECKPOINT_CHUNK = 1 << 18;              // floats moved at a time
constexpr const char* CHECKPOINT_FORMAT = "rdattnres-1";  // metadata "format_version"

// ---- types of other programs ---------------------------------------------------------------------------
// Weights from elsewhere may be stored in 16 bits: BF16 is the upper half of a float32, F16 is IEEE half.
inline float from_16_bits(uint16_t bits, bool bf16) {
  if (bf16) {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float x = std::ldexp(float(exponent ? 1024 + fraction : fraction), std::max(exponent, 1) - 25);
  if (exponent == 31) x = fraction ? NAN : INFINITY;
  return bits & 0x8000 ? -x : x;
}
inline size_t bytes_of(const std::string& dtype) {  // of one element; 0: a type we do not read
  return dtype == "F32" ? 4 : dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

// ---- checksum ------------------------------------------------------------------------------------------
// FNV-1a with 32-bit words in place of bytes: each step is invertible, so no single changed word can go
// unnoticed. Summed over the tensors (name, shape, data) and the metadata (name, text), the checksum survives a
// program that writes them in another order.
struct Checksum {
  uint64_t value = 14695981039346656037u;
  explicit Checksum(const std::string& name, const std::vector<size_t>& shape = {}) {
    mix(name);
    for (size_t d : shape) mix(uint32_t(d)), mix(uint32_t(d >> 32));
  }
  void mix(uint32_t word) { value = (value ^ word) * 1099511628211u; }
  void mix(const std::string& text) {
    for (char c : text) mix(static_cast<unsigned char>(c));
    mix(256);  // ends the text: "ab", "c" is not "a", "bc"
  }
  void mix(const float* data, size_t n) {
    for (size_t i = 0; i < n; i++) {
      uint32_t word;
      memcpy(&word, data + i, 4);
      mix(word);
    }
  }
};
// The metadata's part: all but the checksum itself, and "format", which Python programs add when they save.
inline uint64_t metadata_checksum(const Metadata& metadata) {
  uint64_t sum = 0;
  for (const auto& [name, text] : metadata) {
    if (name == "checksum" || name == "format") continue;
    Checksum checksum(name);
    checksum.mix(text);
    sum += checksum.value;
  }
  return sum;
}
inline std::string checksum_text(uint64_t sum) { return format("%016" PRIx64, sum); }

inline std::string shape_text(const std::vector<size_t>& shape) {  // "3,5"
  std::string text;
  for (size_t d : shape) text += (text.empty() ? "" : ",") + std::to_string(d);
  return text;
}
inline size_t num_elements(const std::vector<size_t>& shape, const std::string& name) {
  size_t n = 1;
  for (size_t d : shape) n = checked_mul(n, d, name.c_str());
  return n;
}

// ---- reading -------------------------------------------------------------------------------------------
struct Checkpoint {
  struct Entry {
    std::string dtype;
    std::vector<size_t> shape;
    size_t begin, end;  // bytes of the data
  };
  InFile file;
  size_t data = 0;  // where the data section starts in the file
  Metadata metadata;
  std::map<std::string, Entry> tensors;

  // Opens a file and checks all of it; fatal if anything is wrong.
  static Checkpoint open(const std::string& path) {
    const std::string index = path + ".index.json";
    if (access(path.c_str(), F_OK) != 0 && access(index.c_str(), F_OK) == 0)
      fatal(EXIT_ERROR,
            index + ": a model in several files, expected one: save it with a larger max_shard_size");
    Checkpoint checkpoint;
    checkpoint.file = InFile(path);
    checkpoint.read_header();
    checkpoint.check_layout();
    checkpoint.check_data();
    if (!checkpoint.metadata.count("arch")) checkpoint.read_config_json();
    return checkpoint;
  }
  std::string try_open(const std::string& path) {  // the same; returns the error, empty when all is well
    return error_of([&] { *this = open(path); });
  }

  // The tensor's entry; fatal if it cannot be read as float32 of this shape.
  const Entry& entry(const std::string& name, const std::vector<size_t>& shape) const {
    const auto found = tensors.find(name);
    if (found == tensors.end()) bad("holds no tensor " + name);
    const Entry& e = found->second;
    if (e.shape != shape)
      bad("tensor " + name + " is (" + shape_text(e.shape) + "), expected (" + shape_text(shape) + ")");
    if (bytes_of(e.dtype) == 0) bad("tensor " + name + " is " + e.dtype + ", expected F32, F16 or BF16");
    return e;
  }

  // Hands out the tensor in chunks, in order: put(offset, n, chunk) with n elements from element offset.
  using Put = std::function<void(size_t offset, size_t n, const float* chunk)>;
  void read(const std::string& name, const std::vector<size_t>& shape, const Put& put) const {
    read_chunks(entry(name, shape), put);
  }

 private:
  static constexpr size_t MAX_HEADER = 16 << 20;

  [[noreturn]] void bad(const std::string& what) const { fatal(EXIT_ERROR, file.path + ": " + what); }

  void read_chunks(const Entry& e, const Put& put) const {
    std::vector<float> chunk(CHECKPOINT_CHUNK);
    const bool halves = bytes_of(e.dtype) == 2;
    std::vector<uint16_t> packed(halves ? CHECKPOINT_CHUNK : 0);
    const size_t bytes = halves ? 2 : 4, total = (e.end - e.begin) / bytes;
    for (size_t offset = 0; offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset), at = data + e.begin + offset * bytes;
      file.read(at, n * bytes, halves ? static_cast<void*>(packed.data()) : chunk.data());
      for (size_t i = 0; halves && i < n; i++) chunk[i] = from_16_bits(packed[i], e.dtype == "BF16");
      put(offset, n, chunk.data());
    }
  }

  void read_header() {
    uint64_t length = 0;
    if (file.size < 8) bad(format("%zu bytes, too short for a safetensors file", file.size));
    file.read(0, 8, &length);
    if (length > MAX_HEADER)
      bad(format("no safetensors file: header of %" PRIu64 " bytes, expected up to %zu", length, MAX_HEADER));
    if (length > file.size - 8)
      bad(format("cut short: header of %" PRIu64 " bytes in a file of %zu", length, file.size));
    data = 8 + length;
    std::string text(length, '\0');
    file.read(8, length, &text[0]);
    Json header;
    const std::string error = JsonParser::parse(text, &header);
    if (!error.empty()) bad("header: " + error);
    if (header.type != Json::object) bad("header: expected a JSON object");
    for (size_t i = 0; i < header.names.size(); i++)
      if (header.names[i] != "__metadata__") read_entry(header.names[i], header.values[i]);

    const Json* strings = header.find("__metadata__");
    if (strings && strings->type != Json::object) bad("header: __metadata__ is no object");
    for (size_t i = 0; strings && i < strings->names.size(); i++) {
      if (strings->values[i].type != Json::string)
        bad("header: metadata " + strings->names[i] + " is no string");
      metadata[strings->names[i]] = unescape_bytes(strings->values[i].text);
    }
  }

  void read_entry(const std::string& name, const Json& object) {
    const auto counts = [&](const char* key) {
      const Json* list = object.find(key);
      bool good = list && list->type == Json::array;
      std::vector<size_t> numbers(good ? list->values.size() : 0);
      for (size_t i = 0; i < numbers.size(); i++) good = good && list->values[i].as_count(&numbers[i]);
      if (!good) bad("header: tensor " + name + ": " + key + " is no list of whole numbers");
      return numbers;
    };
    const Json* dtype = object.find("dtype");
    const std::vector<size_t> offsets = counts("data_offsets");
    if (!dtype || dtype->type != Json::string) bad("header: tensor " + name + " has no dtype");
    if (offsets.size() != 2) bad("header: tensor " + name + ": data_offsets are not two");
    tensors[name] = {dtype->text, counts("shape"), offsets[0], offsets[1]};
  }

  // Each tensor takes the bytes of its shape (of types not read we know only where they lie), and together they
  // fill the data section exactly: no gap, no overlap, nothing after the last one.
  void check_layout() const {
    std::vector<std::pair<size_t, size_t>> places;  // begin, end
    for (const auto& [name, e] : tensors) {
      if (e.end < e.begin) bad("tensor " + name + " ends before it starts");
      const std::string here = file.path + ": tensor " + name;
      const size_t bytes = checked_mul(num_elements(e.shape, here), bytes_of(e.dtype), here.c_str());
      if (bytes_of(e.dtype) > 0 && e.end - e.begin != bytes)
        fatal(EXIT_ERROR, "%s takes %zu bytes, expected %zu for its shape", here.c_str(), e.end - e.begin,
              bytes);
      places.push_back({e.begin, e.end});
    }
    std::sort(places.begin(), places.end());
    size_t at = 0;
    for (const auto& [begin, end] : places) {
      if (begin != at) bad(format("a tensor starts at byte %zu of the data, expected %zu", begin, at));
      at = end;
    }
    if (at != file.size - data)
      bad(format("%zu bytes of data, expected %zu: cut short or altered", file.size - data, at));
  }

  // A file of ours has a checksum; one from elsewhere has neither that nor our format_version.
  void check_data() const {
    const auto version = metadata.find("format_version"), checksum = metadata.find("checksum");
    if (version != metadata.end() && version->second != CHECKPOINT_FORMAT)
      bad("format_version is '" + version->second + "', expected " + CHECKPOINT_FORMAT);
    if (checksum == metadata.end() && version != metadata.end()) bad("metadata lacks checksum");
    if (checksum == metadata.end()) return;
    uint64_t sum = metadata_checksum(metadata);
    for (const auto& [name, e] : tensors) {
      Checksum tensor(name, e.shape);
      read_chunks(e, [&](size_t, size_t n, const float* chunk) { tensor.mix(chunk, n); });
      sum += tensor.value;
    }
    if (checksum_text(sum) != checksum->second)
      bad("checksum " + checksum_text(sum) + ", expected " + checksum->second + ": altered");
  }

  // Hugging Face keeps the sizes in config.json beside the weights; dev/hf/export.py names them as our flags
  // are. Without it the flags must say them.
  void read_config_json() {
    const std::string beside = file.path.substr(0, file.path.rfind('/') + 1) + "config.json";
    if (access(beside.c_str(), F_OK) != 0) return;
    Json config;
    const std::string error = JsonParser::parse(InFile(beside).read_all(), &config);
    if (!error.empty()) fatal(EXIT_ERROR, beside + ": " + error);
    for (const Flag& flag : flag_table()) {
      std::string name = flag.name;
      std::replace(name.begin(), name.end(), '-', '_');
      const Json* value = flag.traits & MODEL ? config.find(name) : nullptr;
      if (value && (value->type == Json::number || value->type == Json::string))
        metadata[flag.name] = value->text;
    }
  }
};

// ---- writing -------------------------------------------------------------------------------------------
struct CheckpointTensor {
  std::string name;
  std::vector<size_t> shape;
  std::function<void(size_t offset, size_t n, float* chunk)> get;  // copies elements offset .. offset+n-1

  // Gets all of it in chunks, in order: put(chunk, n).
  template <class Put>
  void each_chunk(Put put) const {
    std::vector<float> chunk(CHECKPOINT_CHUNK);
    const size_t total = num_elements(shape, name);
    for (size_t offset = 0; offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset);
      get(offset, n, chunk.data());
      put(chunk.data(), n);
    }
  }
};

// The JSON header, padded with spaces so that the data starts at a multiple of 64 bytes in the file.
inline std::string checkpoint_header(const Metadata& metadata, const std::vector<CheckpointTensor>& tensors) {
  std::string header = "{\"__metadata__\":{";
  for (const auto& [name, text] : metadata)
    header += (header.back() == '{' ? "" : ",") + json_quote(name) + ":" + json_quote(escape_bytes(text));
  header += "}";
  size_t offset = 0;
  for (const CheckpointTensor& t : tensors) {
    const size_t end = offset + sizeof(float) * num_elements(t.shape, t.name);
    header += "," + json_quote(t.name) + ":{\"dtype\":\"F32\",\"shape\":[" + shape_text(t.shape) + "],";
    header += format("\"data_offsets\":[%zu,%zu]}", offset, end);
    offset = end;
  }
  header += "}";
  while ((8 + header.size()) % 64 != 0) header += ' ';
  return header;
}

// Writes path, complete or not at all. Adds format_version and checksum to the metadata. The checksum is known
// only after the data: a place is kept for it and filled in at the end. Fatal if anything goes wrong.
inline void checkpoint_write(const std::string& path, Metadata metadata,
                             const std::vector<CheckpointTensor>& tensors) {
  if (ranks.rank > 0) {  // its get hands over what rank 0 is about to write
    for (const CheckpointTensor& t : tensors) t.each_chunk([](const float*, size_t) {});
    return;
  }
  const std::string place(16, '0'), quoted = "\"checksum\":\"";
  metadata["format_version"] = CHECKPOINT_FORMAT;
  metadata["checksum"] = place;
  const std::string header = checkpoint_header(metadata, tensors);
  const uint64_t length = header.size();
  OutFile file(path);
  file.write(&length, sizeof(length));
  file.write(header);

  uint64_t sum = metadata_checksum(metadata);
  for (const CheckpointTensor& t : tensors) {
    Checksum checksum(t.name, t.shape);
    t.each_chunk([&](const float* chunk, size_t n) {
      checksum.mix(chunk, n);
      file.write(chunk, n * sizeof(float));
    });
    sum += checksum.value;
  }
  const size_t at = sizeof(length) + header.find(quoted + place) + quoted.size();
  file.patch(at, checksum_text(sum).data(), place.size());
  file.commit();
}

// A number of the metadata, such as "step"; fatal if it is missing.
inline size_t count_from_metadata(const Metadata& metadata, const std::string& name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) fatal(EXIT_ERROR, "metadata lacks " + name);
  size_t n;
  if (parse_count(found->second, &n)) return n;
  fatal(EXIT_ERROR, "metadata: " + name + " is '" + found->second + "', expected a whole number");
}
