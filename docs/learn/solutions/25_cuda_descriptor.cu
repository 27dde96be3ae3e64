const uint64_t start = (tile + 32 * step) >> 4;  // bits 0 to 13: the address in 16-byte units; a step of 16 columns is 32 bytes
const uint64_t groups = 1024 >> 4;               // bits 32 to 45: from one group of eight rows to the next
const uint64_t swizzle_128 = 1;                  // bits 62 and 63
return start & 0x3FFF | groups << 32 | swizzle_128 << 62;
