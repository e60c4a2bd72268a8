// safetensors.h - safetensors files: eight bytes with the length of a JSON header, the header, the tensors' data.
//
//   {"__metadata__":{"step":"500", ...},
//    "model.wte":{"dtype":"F32","shape":[384,128],"data_offsets":[0,196608]}, ...}
//
// Written as a stream, tensor by tensor in chunks: a model may be larger than the memory left. Read only after
// the whole file has been checked, so that a bad file never half-loads.
#pragma once
#include <algorithm>
#include <functional>
#include <map>

#include "check.h"   // fatal, checked_mul
#include "files.h"   // InFile, OutFile
#include "json.h"    // Json, json_quote

constexpr const char* CHECKPOINT_FORMAT = "rdattnres-1";  // metadata "format_version"
constexpr size_t CHECKPOINT_CHUNK = 1 << 18;              // floats moved at a time

// ---- checksum ------------------------------------------------------------------------------------------
// FNV-1a with 32-bit words in place of bytes, over the tensor's name and its data. The file's checksum is the
// sum over its tensors, so it survives a program that writes them in another order. Each step is invertible:
// no single changed word can go unnoticed.
struct Checksum {
  uint64_t value = 14695981039346656037u;
  explicit Checksum(const std::string& name) {
    for (char c : name) mix(static_cast<unsigned char>(c));
  }
  void mix(uint32_t word) { value = (value ^ word) * 1099511628211u; }
  void mix(const float* data, size_t n) {
    for (size_t i = 0; i < n; i++) {
      uint32_t word;
      memcpy(&word, data + i, 4);
      mix(word);
    }
  }
};
inline std::string checksum_text(uint64_t sum) { return format("%016llx", static_cast<unsigned long long>(sum)); }

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
inline std::string checkpoint_header(const std::map<std::string, std::string>& metadata,
                                     const std::vector<CheckpointTensor>& tensors) {
  std::string header = "{\"__metadata__\":{";
  for (const auto& entry : metadata)
    header += (header.back() == '{' ? "" : ",") + json_quote(entry.first) + ":" + json_quote(entry.second);
  header += "}";
  size_t offset = 0;
  for (const CheckpointTensor& t : tensors) {
    std::string shape;
    for (size_t d : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    const size_t end = checked_add(offset, checked_mul(t.size(), sizeof(float), t.name.c_str()), t.name.c_str());
    header += "," + json_quote(t.name) + format(":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                                                shape.c_str(), offset, end);
    offset = end;
  }
  header += "}";
  while ((8 + header.size()) % 64 != 0) header += ' ';
  return header;
}

// Writes path, complete or not at all. Adds format_version and checksum to the metadata. The checksum is known
// only after the data: a place is kept for it and filled in at the end. Fatal if anything goes wrong.
inline void checkpoint_write(const std::string& path, std::map<std::string, std::string> metadata,
                             const std::vector<CheckpointTensor>& tensors) {
  const std::string place(16, '0'), quoted = "\"checksum\":\"";
  metadata["format_version"] = CHECKPOINT_FORMAT;
  metadata["checksum"] = place;
  const std::string header = checkpoint_header(metadata, tensors);
  const uint64_t length = header.size();
  OutFile file(path);
  file.write(&length, sizeof(length));
  file.write(header);

  uint64_t sum = 0;
  std::vector<float> chunk(CHECKPOINT_CHUNK);
  for (const CheckpointTensor& t : tensors) {
    Checksum checksum(t.name);
    for (size_t offset = 0, total = t.size(); offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset);
      t.get(offset, n, chunk.data());
      checksum.mix(chunk.data(), n);
      file.write(chunk.data(), n * sizeof(float));
    }
    sum += checksum.value;
  }
  file.patch(sizeof(length) + header.find(quoted + place) + quoted.size(), checksum_text(sum).data(), place.size());
  file.commit();
}

// ---- reading -------------------------------------------------------------------------------------------
struct Checkpoint {
  struct Entry { std::string dtype; std::vector<size_t> shape; size_t begin, end; };  // bytes in the data section
  InFile file;
  size_t data = 0;  // where the data section starts in the file
  std::map<std::string, std::string> metadata;
  std::map<std::string, Entry> tensors;

  // Opens and checks all of the file, the data's checksum (if the metadata has one) included. Returns the error,
  // empty when all is well.
  std::string try_open(const std::string& path) {
    std::string error = file.open(path);
    if (error.empty()) {
      error = read_header();
      if (error.empty()) error = check_layout();
      if (error.empty() && metadata.count("checksum")) error = check_data();
      if (!error.empty() && error.compare(0, path.size(), path) != 0) error = path + ": " + error;
    }
    return error;
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
    if (entry.shape != shape)
      return file.path + ": tensor " + name + " is " + shape_text(entry.shape) + ", expected " + shape_text(shape);
    if (entry.dtype != "F32") return file.path + ": tensor " + name + " is " + entry.dtype + ", expected F32";
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
    const size_t total = (entry.end - entry.begin) / sizeof(float);
    for (size_t offset = 0; offset < total; offset += CHECKPOINT_CHUNK) {
      const size_t n = std::min(CHECKPOINT_CHUNK, total - offset);
      const size_t at = data + entry.begin + offset * sizeof(float);
      const std::string error = file.read(at, n * sizeof(float), chunk.data());
      if (!error.empty()) return error;
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
      return format("not a safetensors file: header of %zu bytes, expected at most %zu", size_t(length), MAX_HEADER);
    if (length > file.size - 8)
      return format("cut short: header of %zu bytes in a file of %zu", size_t(length), file.size);
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
      metadata[object.names[i]] = object.values[i].text;
    }
    return "";
  }

  std::string read_entry(const std::string& name, const Json& object) {
    const Json *dtype = object.find("dtype"), *shape = object.find("shape"), *offsets = object.find("data_offsets");
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

  // The tensors must fill the data section exactly: no gap, no overlap, nothing after the last one.
  std::string check_layout() const {
    std::vector<std::pair<size_t, std::string>> order;
    for (const auto& t : tensors) order.push_back({t.second.begin, t.first});
    std::sort(order.begin(), order.end());
    size_t at = 0;
    for (const auto& place : order) {
      const Entry& entry = tensors.at(place.second);
      const char* name = place.second.c_str();
      if (entry.end < entry.begin) return format("tensor %s ends before it starts", name);
      if (entry.begin != at && entry.begin != entry.end)
        return format("tensor %s starts at byte %zu of the data, expected %zu", name, entry.begin, at);
      size_t bytes = entry.dtype == "F32" ? sizeof(float) : 0;  // of other types we only know where they lie
      for (size_t d : entry.shape) {
        if (d != 0 && bytes > SIZE_MAX / d) return format("tensor %s: its shape does not fit in 64 bits", name);
        bytes *= d;
      }
      if (entry.dtype == "F32" && entry.end - entry.begin != bytes)
        return format("tensor %s takes %zu bytes, expected %zu for its shape", name, entry.end - entry.begin, bytes);
      at = std::max(at, entry.end);
    }
    if (at != file.size - data)
      return format("data section of %zu bytes, expected %zu: the file is cut short or altered", file.size - data, at);
    return "";
  }

  std::string check_data() const {
    uint64_t sum = 0;
    for (const auto& t : tensors) {
      Checksum checksum(t.first);
      const auto mix = [&](size_t, size_t n, const float* chunk) { checksum.mix(chunk, n); };
      const std::string error = read_chunks(t.second, mix);
      if (!error.empty()) return error;
      sum += checksum.value;
    }
    if (checksum_text(sum) == metadata.at("checksum")) return "";
    return "checksum " + checksum_text(sum) + ", expected " + metadata.at("checksum") + ": the data was altered";
  }
};
