-- Several functions in one call: all that a process asks at one moment of the keys of one node, or in a cluster of one slot.
local together = {parts = {}}

-- Register a function that may be one of those. Each of them may also be called by itself.
function together.register(name, callback, flags)
  together.parts[name] = callback
  redis.register_function{function_name = VERSION .. '_' .. name, flags = flags or {'allow-oom'}, callback = callback}
end

-- Register a step in a queue. `take` is given the state and the arguments, and returns the answer, `instants` where that is
-- nothing, and whether it has changed no figures.
local function step(name, take)
  together.register(name, function(keys, args)
    local s = open(keys, args)
    local answer, unchanged = take(s, args)
    if unchanged then
      leave(s)
    else
      save(s)
    end
    return answer or instants(s)
  end)
end

-- together: of each function whether it came to its end, and its answer or the text of its error. One that fails does not keep the
-- others from being done. Arguments: for each its name, its key, the number of its arguments, and these.
redis.register_function{function_name = VERSION .. '_together', flags = {'allow-oom'}, callback = function(_, args)
  local answers, at = {}, 1
  while args[at] do
    local last = at + 2 + tonumber(args[at + 2])
    local done, answer = pcall(together.parts[args[at]], {args[at + 1]}, {unpack(args, at + 3, last)})
    if done then
      answers[#answers + 1] = {1, answer}
    else
      answers[#answers + 1] = {0, type(answer) == 'table' and answer.err or tostring(answer)}
    end
    at = last + 1
  end
  return answers
end}
