// checkpoint.h - safetensors files: eight bytes with the length of a JSON header, the header, the data.
//
//   {"__metadata__":{"step":"500", ...},
//    "model.wte":{"dtype":"F32","shape":[384,128],"data_offsets":[0,196608]}, ...}
//
// A checkpoint's tensors are named model.<name>, adam_m.<name> and adam_v.<name> after the table in config.h.
// Its metadata are strings: the model's sizes by the names of their flags, what the trainer adds (step, tokens,
// the other settings), format_version and checksum. The whole file is checked before a tensor is read, so a bad
// file never half-loads. Tensors are read and written in chunks: a model may be larger than the memory left.
#pragma once
#include <algorithm>
#include <cinttypes>
#include <functional>
#include <map>

#include "dev/common/config.h"  // Config, ARCH_NAMES
#include "dev/common/errors.h"  // fatal, checked_mul
#include "dev/common/files.h"   // InFile, OutFile
#include "dev/common/flags.h"   // set_flag, model_problem: the same limits as on the command line
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
  explicit Checksum(const std::string& name) { mix(name); }
  Checksum(const std::string& name, const std::vector<size_t>& shape) {
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
inline uint64_t metadata_checksum(const std::map<std::string, std::string>& metadata) {
  uint64_t sum = 0;
  for (const auto& entry : metadata) {
    if (entry.first == "checksum" || entry.first == "format") continue;
    Checksum checksum(entry.first);
    checksum.mix(entry.second);
    sum += checksum.value;
  }
  return sum;
}
inline std::string checksum_text(uint64_t sum) { return format("%016" PRIx64, sum); }

// ---- reading -------------------------------------------------------------------------------------------
struct Checkpoint {
  struct Entry {
    std::string dtype;
    std::vector<size_t> shape;
    size_t begin, end;
  };  // bytes of the data
  InFile file;
  size_t data = 0;  // where the data section starts in the file
  std::map<std::string, std::string> metadata;
  std::map<std::string, Entry> tensors;

  // Opens and checks all of the file. Returns the error, empty when all is well.
  std::string try_open(const std::string& path) {
    const std::string index = path + ".index.json";
    if (access(path.c_str(), F_OK) != 0 && access(index.c_str(), F_OK) == 0)
      return index + ": a model in several files, expected one: save it with a larger max_shard_size";
    std::string error = file.open(path);
    if (error.empty()) error = read_header();
    if (error.empty()) error = check_layout();
    if (error.empty()) error = check_data();
    if (error.empty() && !metadata.count("arch")) error = read_config_json(path);
    const bool names_file = error.compare(0, path.size(), path) == 0;
    return error.empty() || names_file ? error : path + ": " + error;
  }
  static Checkpoint open(const std::string& path) {  // the same, fatal on error
    Checkpoint checkpoint;
    fatal_if(checkpoint.try_open(path));
    return checkpoint;
  }

  bool has(const std::string& name) const { return tensors.count(name) > 0; }

  // Why the tensor cannot be read as float32 of this shape; empty if it can. Ask for all before reading any.
  std::string problem(const std::string& name, const std::vector<size_t>& shape) const {
    const auto found = tensors.find(name);
    if (found == tensors.end()) return file.path + ": holds no tensor " + name;
    const Entry& entry = found->second;
    const std::string here = file.path + ": tensor " + name + " is ";
    if (entry.shape != shape) return here + shape_text(entry.shape) + ", expected " + shape_text(shape);
    if (bytes_of(entry.dtype) == 0) return here + entry.dtype + ", expected F32, F16 or BF16";
    return "";
  }

  // Hands out the tensor in chunks, in order: put(offset, n, chunk) with n elements from element offset.
  void read(const std::string& name, const std::vector<size_t>& shape,
            const std::function<void(size_t offset, size_t n, const float* chunk)>& put) const {
    fatal_if(problem(name, shape));
    fatal_if(read_chunks(tensors.at(name), put));
  }

 private:
  using Put = std::function<void(size_t, size_t, const float*)>;
  static constexpr size_t MAX_HEADER = 16 << 20;

  static std::string shape_text(const std::vector<size_t>& shape) {
    std::string text;
    for (size_t d : shape) text += (text.empty() ? "" : ",") + std::to_string(d);
    return "(" + text + ")";
  }

  std::string read_chunks(const Entry& entry, const Put& put) const {
    std::vector<float> chunk(CHECKPOINT_CHUNK);
    const bool halves = bytes_of(entry.dtype) == 2;
    std::vector<uint16_t> packed(halves ? CHECKPOINT_CHUNK : 0);
    const size_t bytes = halves ? 2 : 4, total = (entry.end - entry.begin) / bytes;
    for (size_t offset = 0; offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset), at = data + entry.begin + offset * bytes;
      void* target = halves ? static_cast<void*>(packed.data()) : chunk.data();
      const std::string error = file.read(at, n * bytes, target);
      if (!error.empty()) return error;
      for (size_t i = 0; halves && i < n; i++) chunk[i] = from_16_bits(packed[i], entry.dtype == "BF16");
      put(offset, n, chunk.data());
    }
    return "";
  }

  std::string read_header() {
    uint64_t length = 0;
    if (file.size < 8) return format("%zu bytes, too short for a safetensors file", file.size);
    std::string error = file.read(0, 8, &length);
    if (!error.empty()) return error;
    if (length > MAX_HEADER)
      return format("no safetensors file: header of %" PRIu64 " bytes, expected up to %zu", length, MAX_HEADER);
    if (length > file.size - 8)
      return format("cut short: header of %" PRIu64 " bytes in a file of %zu", length, file.size);
    data = 8 + length;
    std::string text(length, '\0');
    error = file.read(8, length, &text[0]);
    if (!error.empty()) return error;
    Json header;
    error = JsonParser::parse(text, &header);
    if (!error.empty()) return "header: " + error;
    if (header.type != Json::object) return "header: expected a JSON object";
    for (size_t i = 0; i < header.names.size(); i++) {
      error = header.names[i] == "__metadata__" ? read_metadata(header.values[i])
                                                : read_entry(header.names[i], header.values[i]);
      if (!error.empty()) return "header: " + error;
    }
    return "";
  }

  std::string read_metadata(const Json& object) {
    if (object.type != Json::object) return "__metadata__ is no object";
    for (size_t i = 0; i < object.names.size(); i++) {
      if (object.values[i].type != Json::string) return "metadata " + object.names[i] + " is no string";
      metadata[object.names[i]] = unescape_bytes(object.values[i].text);
    }
    return "";
  }

  // Hugging Face keeps the sizes in config.json beside the weights; dev/hf/export.py names them as our flags
  // are.
  std::string read_config_json(const std::string& path) {
    const std::string beside = path.substr(0, path.rfind('/') + 1) + "config.json";
    if (access(beside.c_str(), F_OK) != 0) return "";  // then the flags must say them
    InFile config_file;
    std::string error = config_file.open(beside);
    std::string text(std::min(config_file.size, MAX_HEADER), '\0');
    if (error.empty()) error = config_file.read(0, text.size(), &text[0]);
    if (!error.empty()) return error;
    Json config;
    error = JsonParser::parse(text, &config);
    if (!error.empty()) return beside + ": " + error;
    for (const Flag& flag : flag_table()) {
      std::string name = flag.name;
      std::replace(name.begin(), name.end(), '-', '_');
      const Json* value = flag.traits & MODEL ? config.find(name.c_str()) : nullptr;
      if (value && (value->type == Json::number || value->type == Json::string))
        metadata[flag.name] = value->text;
    }
    return "";
  }

  std::string read_entry(const std::string& name, const Json& object) {
    const Json *dtype = object.find("dtype"), *shape = object.find("shape");
    const Json* offsets = object.find("data_offsets");
    if (!dtype || dtype->type != Json::string) return "tensor " + name + " has no dtype";
    if (!shape || shape->type != Json::array) return "tensor " + name + " has no shape";
    if (!offsets || offsets->type != Json::array || offsets->values.size() != 2)
      return "tensor " + name + " has no data_offsets";
    Entry entry = {dtype->text, {}, 0, 0};
    for (const Json& d : shape->values) {
      entry.shape.push_back(0);
      if (!d.as_count(&entry.shape.back())) return "tensor " + name + ": a dimension is no whole number";
    }
    if (!offsets->values[0].as_count(&entry.begin) || !offsets->values[1].as_count(&entry.end))
      return "tensor " + name + ": data_offsets are no whole numbers";
    tensors[name] = entry;
    return "";
  }

  // What is wrong with a tensor's place, empty if nothing. Of types not read we know only where they lie.
  static std::string check_entry(const Entry& entry) {
    if (entry.end < entry.begin) return "ends before it starts";
    size_t bytes = bytes_of(entry.dtype);
    if (bytes == 0) return "";
    for (size_t d : entry.shape) {
      if (d != 0 && bytes > SIZE_MAX / d) return "has a shape that does not fit in 64 bits";
      bytes *= d;
    }
    if (entry.end - entry.begin == bytes) return "";
    return format("takes %zu bytes, expected %zu for its shape", entry.end - entry.begin, bytes);
  }

  // The tensors must fill the data section exactly: no gap, no overlap, nothing after the last one.
  std::string check_layout() const {
    std::vector<std::pair<size_t, size_t>> places;  // begin, end
    for (const auto& t : tensors) {
      const std::string error = check_entry(t.second);
      if (!error.empty()) return "tensor " + t.first + " " + error;
      places.push_back({t.second.begin, t.second.end});
    }
    std::sort(places.begin(), places.end());
    size_t at = 0;
    for (const auto& place : places) {
      if (place.first != at)
        return format("a tensor starts at byte %zu of the data, expected %zu", place.first, at);
      at = place.second;
    }
    if (at == file.size - data) return "";
    return format("%zu bytes of data, expected %zu: cut short or altered", file.size - data, at);
  }

  // A file of ours has a checksum; one from elsewhere has neither that nor our format_version.
  std::string check_data() const {
    const auto version = metadata.find("format_version");
    if (version != metadata.end() && version->second != CHECKPOINT_FORMAT)
      return "format_version is '" + version->second + "', expected " + CHECKPOINT_FORMAT;
    if (!metadata.count("checksum")) return metadata.count("format_version") ? "metadata lacks checksum" : "";
    uint64_t sum = metadata_checksum(metadata);
    for (const auto& t : tensors) {
      Checksum checksum(t.first, t.second.shape);
      const auto mix = [&](size_t, size_t n, const float* chunk) { checksum.mix(chunk, n); };
      const std::string error = read_chunks(t.second, mix);
      if (!error.empty()) return error;
      sum += checksum.value;
    }
    if (checksum_text(sum) == metadata.at("checksum")) return "";
    return "checksum " + checksum_text(sum) + ", expected " + metadata.at("checksum") + ": altered";
  }
};

// ---- writing -------------------------------------------------------------------------------------------
struct CheckpointTensor {
  std::string name;
  std::vector<size_t> shape;
  std::function<void(size_t offset, size_t n, float* chunk)> get;  // copies elements offset .. offset+n-1
  size_t size() const {
    size_t n = 1;
    for (size_t d : shape) n = checked_mul(n, d, name.c_str());
    return n;
  }
};

// The JSON header, padded with spaces so that the data starts at a multiple of 64 bytes in the file.
inline std::string checkpoint_header(const Metadata& metadata, const std::vector<CheckpointTensor>& tensors) {
  std::string header = "{\"__metadata__\":{";
  for (const auto& entry : metadata)
    header += (header.back() == '{' ? "" : ",") + json_quote(entry.first) + ":" +
              json_quote(escape_bytes(entry.second));
  header += "}";
  size_t offset = 0;
  for (const CheckpointTensor& t : tensors) {
    std::string shape;
    for (size_t d : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    const size_t bytes = checked_mul(t.size(), sizeof(float), t.name.c_str());
    const size_t end = checked_add(offset, bytes, t.name.c_str());
    header += "," + json_quote(t.name) + ":{\"dtype\":\"F32\",\"shape\":[" + shape + "],";
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
  const std::string place(16, '0'), quoted = "\"checksum\":\"";
  metadata["format_version"] = CHECKPOINT_FORMAT;
  metadata["checksum"] = place;
  const std::string header = checkpoint_header(metadata, tensors);
  const uint64_t length = header.size();
  OutFile file(path);
  file.write(&length, sizeof(length));
  file.write(header);

  uint64_t sum = metadata_checksum(metadata);
  std::vector<float> chunk(CHECKPOINT_CHUNK);
  for (const CheckpointTensor& t : tensors) {
    Checksum checksum(t.name, t.shape);
    for (size_t offset = 0, total = t.size(); offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset);
      t.get(offset, n, chunk.data());
      checksum.mix(chunk.data(), n);
      file.write(chunk.data(), n * sizeof(float));
    }
    sum += checksum.value;
  }
  const size_t at = sizeof(length) + header.find(quoted + place) + quoted.size();
  file.patch(at, checksum_text(sum).data(), place.size());
  file.commit();
}

// ---- metadata ------------------------------------------------------------------------------------------
inline Metadata config_to_metadata(const Config& c) {
  return {{"arch", ARCH_NAMES[int(c.arch)]}, {"layers", std::to_string(c.L)},
          {"width", std::to_string(c.C)},    {"heads", std::to_string(c.NH)},
          {"ffn", std::to_string(c.F)},      {"block-size", std::to_string(c.S)},
          {"context", std::to_string(c.T)},  {"vocab", std::to_string(c.V)}};
}

// Reads the sizes back. Returns the error, empty when all is well: a file from elsewhere may say anything.
inline std::string config_from_metadata(const Metadata& metadata, Config* config) {
  Options o;
  for (const auto& field : config_to_metadata(Config())) {
    const auto found = metadata.find(field.first);
    if (found == metadata.end()) return "metadata lacks " + field.first;
    const std::string allowed = set_flag(o, *find_flag(field.first), found->second);
    if (!allowed.empty())
      return "metadata: " + field.first + " is '" + found->second + "', expected " + allowed;
  }
  const std::string problem = model_problem(o);
  if (!problem.empty()) return "metadata: " + problem;
  *config = model_config(o);
  return "";
}

// A number of the metadata, such as "step".
inline std::string count_from_metadata(const Metadata& metadata, const std::string& name, size_t* value) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) return "metadata lacks " + name;
  uint64_t n = 0;
  if (!parse_count(found->second, &n))
    return "metadata: " + name + " is '" + found->second + "', expected a whole number";
  *value = n;
  return "";
}
