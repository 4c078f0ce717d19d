-- For wrk. First argument: the file with a request's body; each request gets a new question number.

local before, after
local count = 0

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  local body = file:read("*a")
  file:close()
  local whole = wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)
  local _, last = whole:find("question 000000000", 1, true)
  before, after = whole:sub(1, last - 9), whole:sub(last + 1)
end

function request()
  count = count + 1
  return before .. string.format("%09d", count) .. after
end

function done(summary, latency, requests)
  local failed = summary.errors
  io.write(string.format('\nresult {"requests":%d,"bytes":%.0f,"errors":%d}\n', summary.requests, summary.bytes,
    failed.connect + failed.read + failed.write + failed.status + failed.timeout))
end
