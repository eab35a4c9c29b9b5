"""The scripts of the Redis registry. Each runs as a whole, and takes its time from the server.

Keys, all in one hash slot:
    members     hash  member id -> JSON: address, incarnation, joined_us, draining, and in `held`
                      the partitions that it has open, separated by commas
    beats       hash  member id -> server time of its last beat, in ms
    suspected   hash  member id -> server time at which it is gone without another beat, in ms
    assignment  hash  version; picture: JSON of holders and pinned partitions
    progress    hash  seen_version; beat_ms: the last beat of any member; since_ms: no long gap
                      between beats since then
    commits     hash  partition -> the highest commit number that storage has reported, in 20 digits
Channel: changes.

Garbage in a value counts as no value. Garbage in place of a key fails the script.
"""

from typing import Final

_COMMON: Final = """
local function number(text)
  local value = tonumber(text)
  if value and value >= 0 and value <= 4503599627370496 then return math.floor(value) end
  return 0
end
local function text(value) return string.format('%.0f', value) end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)
local function decoded(stored)
  local read, entry = pcall(cjson.decode, stored or '')
  if read and type(entry) == 'table' and type(entry.address) == 'string'
      and type(entry.incarnation) == 'string' and type(entry.joined_us) == 'string' then
    return entry
  end
  return nil
end
local function found(members, id) return decoded(redis.call('HGET', members, id)) end
local function stored(members, id, entry) redis.call('HSET', members, id, cjson.encode(entry)) end
local function held_by(entry) return type(entry.held) == 'string' and entry.held or '' end
-- When a member is gone without another beat.
local function deadline_of(beats, suspected, id, time_to_live_ms)
  local last_ms = math.min(number(redis.call('HGET', beats, id)), now_ms)
  local suspected_ms = number(redis.call('HGET', suspected, id))
  if suspected_ms > 0 then return math.min(last_ms + time_to_live_ms, suspected_ms) end
  return last_ms + time_to_live_ms
end
local function append(answer, id, entry)
  for _, part in ipairs({id, entry.address, entry.incarnation,
                         entry.draining == true and '1' or '0', held_by(entry)}) do
    answer[#answer + 1] = part
  end
end
"""

BEAT: Final = (
    _COMMON
    + """
local members, beats, suspected, assignment, progress = unpack(KEYS)
local channel, id, address, incarnation = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local joined_us, draining = number(ARGV[5]), ARGV[6] == '1'
local seen_version, time_to_live_ms, held = number(ARGV[7]), number(ARGV[8]), ARGV[9]
local changed = false

local own = found(members, id)
if own and own.incarnation ~= incarnation then
  if joined_us > 0 and joined_us < number(own.joined_us) then return {'REPLACED', own.address} end
  own = nil
end
if not own then
  if joined_us == 0 then joined_us = now_us end
  own = {address = address, incarnation = incarnation, joined_us = text(joined_us),
         draining = draining, held = held}
  stored(members, id, own)
  changed = true
elseif own.address ~= address or held_by(own) ~= held then
  own.address = address
  own.held = held
  stored(members, id, own)
  changed = true
end
redis.call('HSET', beats, id, text(now_ms))
redis.call('HDEL', suspected, id)

-- A gap means that the registry was away, or that its clock jumped: members had no way to beat.
local beat_ms = number(redis.call('HGET', progress, 'beat_ms'))
local since_ms = number(redis.call('HGET', progress, 'since_ms'))
if since_ms == 0 or since_ms > now_ms or beat_ms > now_ms
    or now_ms - beat_ms > time_to_live_ms / 2 then
  since_ms = now_ms
end
local settled = now_ms - since_ms >= time_to_live_ms
seen_version = math.max(seen_version, number(redis.call('HGET', progress, 'seen_version')))
redis.call('HSET', progress, 'beat_ms', text(now_ms), 'since_ms', text(since_ms),
  'seen_version', text(seen_version))

local answer = {'OK', own.joined_us, own.draining == true and '1' or '0', settled and '1' or '0',
  text(seen_version), text(number(redis.call('HGET', assignment, 'version'))),
  redis.call('HGET', assignment, 'picture') or ''}
local everyone = redis.call('HGETALL', members)
for at = 1, #everyone, 2 do
  local other, entry = everyone[at], decoded(everyone[at + 1])
  if number(redis.call('HGET', beats, other)) > now_ms then  -- the clock of the server went back
    redis.call('HSET', beats, other, text(now_ms))
  end
  if entry and deadline_of(beats, suspected, other, time_to_live_ms) > now_ms then
    append(answer, other, entry)
  else
    redis.call('HDEL', members, other)
    redis.call('HDEL', beats, other)
    redis.call('HDEL', suspected, other)
    changed = true
  end
end
if changed then redis.call('PUBLISH', channel, id) end
return answer
"""
)

LOOK: Final = (
    _COMMON
    + """
local members, beats, suspected, assignment, progress = unpack(KEYS)
local time_to_live_ms = number(ARGV[2])
local beat_ms = number(redis.call('HGET', progress, 'beat_ms'))
local since_ms = number(redis.call('HGET', progress, 'since_ms'))
local settled = since_ms > 0 and now_ms - since_ms >= time_to_live_ms
  and now_ms - beat_ms <= time_to_live_ms / 2
local answer = {settled and '1' or '0',
  text(number(redis.call('HGET', progress, 'seen_version'))),
  text(number(redis.call('HGET', assignment, 'version'))),
  redis.call('HGET', assignment, 'picture') or ''}
local everyone = redis.call('HGETALL', members)
for at = 1, #everyone, 2 do
  local id, entry = everyone[at], decoded(everyone[at + 1])
  if entry and deadline_of(beats, suspected, id, time_to_live_ms) > now_ms then
    append(answer, id, entry)
  end
end
return answer
"""
)

LEAVE: Final = (
    _COMMON
    + """
local members, beats, suspected = KEYS[1], KEYS[2], KEYS[3]
local channel, id, incarnation = ARGV[1], ARGV[2], ARGV[3]
local own = found(members, id)
if own and own.incarnation == incarnation then
  redis.call('HDEL', members, id)
  redis.call('HDEL', beats, id)
  redis.call('HDEL', suspected, id)
  redis.call('PUBLISH', channel, id)
  return 1
end
return 0
"""
)

SUSPECT: Final = (
    _COMMON
    + """
local members, beats, suspected = KEYS[1], KEYS[2], KEYS[3]
local channel, id, incarnation = ARGV[1], ARGV[2], ARGV[3]
local beat_ms, suspect_ms = number(ARGV[4]), number(ARGV[5])
local other = found(members, id)
if not other or other.incarnation ~= incarnation or redis.call('HEXISTS', suspected, id) == 1 then
  return 0
end
-- Not before its next beat is due: a member that is well must be able to answer.
local last_ms = math.min(number(redis.call('HGET', beats, id)), now_ms)
redis.call('HSET', suspected, id, text(math.max(now_ms, last_ms + beat_ms) + suspect_ms))
redis.call('PUBLISH', channel, id)
return 1
"""
)

DRAIN: Final = (
    _COMMON
    + """
local members = KEYS[1]
local channel, id, incarnation = ARGV[1], ARGV[2], ARGV[3]
local other = found(members, id)
if not other or other.incarnation ~= incarnation then return 0 end
other.draining = true
stored(members, id, other)
redis.call('PUBLISH', channel, id)
return 1
"""
)

ASSIGN: Final = (
    _COMMON
    + """
local assignment, progress = KEYS[4], KEYS[5]
local channel, expected, version, picture = ARGV[1], number(ARGV[2]), number(ARGV[3]), ARGV[4]
local current = number(redis.call('HGET', assignment, 'version'))
local seen_version = number(redis.call('HGET', progress, 'seen_version'))
if current ~= expected or version <= current or version <= seen_version then return 0 end
redis.call('HSET', assignment, 'version', text(version), 'picture', picture)
redis.call('HSET', progress, 'seen_version', text(version))
redis.call('PUBLISH', channel, text(version))
return 1
"""
)

# ARGV[2] is the highest number that is not garbage, then partitions and numbers in turn.
REPORT_COMMITS: Final = """
local commits, highest = KEYS[6], ARGV[2]
for at = 3, #ARGV, 2 do
  local known = redis.call('HGET', commits, ARGV[at])
  if not known or #known ~= #highest or known > highest or known < ARGV[at + 1] then
    redis.call('HSET', commits, ARGV[at], ARGV[at + 1])
  end
end
return 1
"""

HIGHEST_COMMIT: Final = "return redis.call('HGET', KEYS[6], ARGV[2]) or ''"
