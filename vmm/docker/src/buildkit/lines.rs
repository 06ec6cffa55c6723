//! Where in a Dockerfile a build has failed, for clients that show it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::grpc::Status;

/// What clients know the place of a failure by (BuildKit's `solver/errdefs`), and the longest
/// Dockerfile that is sent for it, in bytes.
const SOURCE: &str = "github.com/moby/buildkit/errdefs.Source+json";
const SHOWN_BYTES_MAX: usize = 16 << 10;

/// A failure with the line of the Dockerfile that it is about, which clients show.
pub fn at(status: Status, file: &str, text: &str, line: usize) -> Status {
    if line == 0 || text.len() > SHOWN_BYTES_MAX {
        return status;
    }
    let place = json!({ "line": line });
    let source = json!({
        "info": { "filename": file, "data": STANDARD.encode(text), "language": "Dockerfile" },
        "ranges": [{ "start": place, "end": place }],
    });
    status.with(SOURCE, source.to_string().into_bytes())
}
