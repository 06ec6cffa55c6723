//! `GET /containers/{id}/changes`: what a container has changed of its image.

use std::sync::Arc;

use exocell_cell::Strength;
use exocell_cell::agent::client::{self, ClientError};
use serde_json::{Value, json};

use crate::archive;
use crate::error::{ApiError, ApiResult};
use crate::http::Response;
use crate::place::Place;
use crate::reach::Reach;
use crate::state::Server;
use crate::views;

/// A guest cannot fill the server with names, in bytes.
const NAMES_BYTES_MAX: u64 = 64 << 20;

/// Lists the changes of a container that runs or has ended.
pub async fn changes(server: &Arc<Server>, key: &str, place: &Place) -> ApiResult<Response> {
    let seen = server.find(key).await?;
    if seen.container.spec.strength == Strength::Isolate {
        return Err(ApiError::unsupported("diff of an isolate", "it has no files but its folders"));
    }
    let has_disk = seen.container.spec.disk.as_ref().is_some_and(|disk| disk.exists());
    if seen.cell.is_none() && !has_disk {
        // Nobody has put anything into it yet.
        return Ok(views::ok(&json!([])));
    }
    let (reach, told) = archive::begun(server, seen.id(), place, ask).await?;
    // An idle cell ends with it.
    let ended = server.blocking(move |_| {
        drop(reach);
        Ok(())
    });
    ended.await?;
    Ok(views::ok(&listed(&told)?))
}

/// What the guest tells. Blocks.
fn ask(reach: &Reach) -> ApiResult<Vec<u8>> {
    let guest = reach.guest()?;
    let mut told = Vec::new();
    match client::changes(&guest, &guest, &mut told, NAMES_BYTES_MAX) {
        Ok(_) => Ok(told),
        Err(ClientError::TooMuch { .. }) => Err(ApiError::bad_request(format!(
            "the names of what the container has changed take more than {} MiB; look at parts of it \
             (docker cp)",
            NAMES_BYTES_MAX >> 20
        ))),
        Err(error) => Err(reach.failure(ApiError::internal(error.to_string()))),
    }
}

/// The guest's words, a letter and a path each, in the API's form.
fn listed(told: &[u8]) -> ApiResult<Value> {
    let records = told.split(|byte| *byte == 0).filter(|record| !record.is_empty());
    let changes = records.map(|record| {
        let kind = match record.first() {
            Some(b'C') => 0,
            Some(b'A') => 1,
            Some(b'D') => 2,
            _ => return Err(ApiError::internal("the guest told no kind of a change")),
        };
        let path = String::from_utf8_lossy(record.get(1..).unwrap_or_default());
        Ok(json!({ "Path": path, "Kind": kind }))
    });
    changes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_words_become_the_apis() {
        let told = listed(b"C/etc\0A/etc/new\0D/b\xff\0").unwrap();
        let expected = json!([
            { "Path": "/etc", "Kind": 0 }, { "Path": "/etc/new", "Kind": 1 },
            { "Path": "/b\u{fffd}", "Kind": 2 },
        ]);
        assert_eq!((told, listed(b"").unwrap()), (expected, json!([])));
        assert!(listed(b"X/etc\0").is_err());
    }
}
