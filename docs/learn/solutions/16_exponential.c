const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which then lies in the lowest bits
const float clamped = x < -87.0f ? -87.0f : x;
const float shifted = clamped * 1.44269504f + magic, n = shifted - magic;
const float r = clamped - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two parts: n times the first is exact
float y = 1.0f / 5040;
y = y * r + 1.0f / 720, y = y * r + 1.0f / 120, y = y * r + 1.0f / 24;
y = y * r + 1.0f / 6, y = y * r + 0.5f, y = y * r + 1.0f, y = y * r + 1.0f;
int32_t bits, power;
memcpy(&bits, &y, 4), memcpy(&power, &shifted, 4);
bits += (int32_t)((uint32_t)power << 23);  // times 2^n
memcpy(&y, &bits, 4);
return x < -87.0f ? 0.0f : y;
