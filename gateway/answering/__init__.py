"""How a request becomes an answer: read, placed, prompted, generated, streamed.

The objects of one request, in the order in which they are made:

| object | born | dies | owns |
|---|---|---|---|
| `RequestMeter` | the request arrives | its outcome is booked | reservation, charge, rows |
| `RequestTrace` | the body is read (where traced) | the response ends | span, captured text |
| `RequestContext` | the body is read | the response ends | nothing; facts beside the body |
| `RequestWalk` | planning begins | the chain ends | which model is next |
| `ParsedRequest` | the walk reaches a model | the next model's is read | one query for each place |
| `Lineup` | with its `ParsedRequest` | with it | the candidates, in order |
| `FallbackChain` | planning ends | its `parts` end | the walk, the lineup, the responder |
| `AnswerResponse` | planning ends | the last byte, or departure | the chain while it is sent |
| `LocalCandidate` and its kind | with its `Lineup` | with it | one query and its patience |
| `Job` | a local candidate is opened | with its `Generation` | the engine's requests |
| `Generation` | a local candidate is opened | its `deltas` end | a stream for each choice |
| `ChoiceStream` | with its `Generation` | its `deltas` end | one request at the engine |
| `Choice` | with its stream | with it | the text so far, its usage |
| `LocalResponder` and its kind | a candidate is opened | its `parts` end | the generation or call |

Closing a generator of `parts` or `deltas` ends everything below it.
"""
