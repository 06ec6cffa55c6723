//! The part of the protocol that is about one sandbox: commands, files, watches. Clients find it
//! at port 49983 of a sandbox; here the server answers for it, and the guest holds nothing of it.
//!
//! Read it in this order: [`serve`] (which call is which) -> `connect` (its frames) -> `process`
//! and [`programs`] (commands) -> `filesystem`, [`watchers`] and `files` (files).

mod connect;
mod files;
mod filesystem;
pub mod process;
pub mod programs;
pub mod signature;
pub mod watchers;

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::{HeaderMap, Method, StatusCode};
use serde_json::json;

use crate::error::{Problem, Result};
use crate::http::{Call, Response, empty, json_reply, refusal};
use crate::note::Note;
use crate::sandbox::Sandbox;
use crate::state::Server;

/// What envd's protocol is here, which is what clients go by.
pub const VERSION: &str = "0.6.13";
/// The port at which clients look for this.
pub const PORT: u16 = 49983;
/// The longest name of a user.
const USER_BYTES_MAX: usize = 64;

/// Answers one call on `sandbox`.
pub async fn serve(server: &Arc<Server>, sandbox: Arc<Sandbox>, mut call: Call) -> Response {
    let path = call.path.clone();
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match (&call.method, parts.as_slice()) {
        (&Method::GET, ["health"]) => return empty(StatusCode::NO_CONTENT),
        (&Method::GET | &Method::POST, ["files"]) => {
            let done = match call.method == Method::GET {
                true => files::get(&sandbox, call).await,
                false => files::post(&sandbox, call).await,
            };
            return done.unwrap_or_else(|problem| refusal(&problem));
        }
        _ => {}
    }
    let is_call = matches!(parts.as_slice(), ["process.Process" | "filesystem.Filesystem", _]);
    if !sandbox.lets_in(call.header("x-access-token")) {
        let problem = Problem::unauthorized(
            "unauthorized access, please provide a valid access token (X-Access-Token)",
        );
        return if is_call { connect::refused(&call, &problem) } else { refusal(&problem) };
    }
    if let Err(problem) = call.count(sandbox.tenant()) {
        return if is_call { connect::refused(&call, &problem) } else { refusal(&problem) };
    }
    match (&call.method, parts.as_slice()) {
        (&Method::POST, ["process.Process", verb]) => {
            process::serve(server, sandbox, verb, call).await
        }
        (&Method::POST, ["filesystem.Filesystem", verb]) => {
            filesystem::serve(sandbox, verb, call).await
        }
        (&Method::GET, ["envs"]) => json_reply(StatusCode::OK, &sandbox.note().env),
        (&Method::GET, ["version"]) => json_reply(StatusCode::OK, &json!({ "version": VERSION })),
        _ => refusal(&Problem::not_found(format!("there is no {} {path}", call.method))),
    }
}

/// Who a call is for: the name of its Basic authorization, which has no password.
fn user(note: &Note, headers: &HeaderMap) -> Result<String> {
    let Some(value) = headers.get(hyper::header::AUTHORIZATION) else {
        return Ok(note.user.clone());
    };
    let wrong = || Problem::unauthorized("the authorization names no user: say Basic NAME:");
    let text = value.to_str().ok().and_then(|text| text.strip_prefix("Basic "));
    let bytes = text.and_then(|text| STANDARD.decode(text.trim()).ok()).ok_or_else(wrong)?;
    let text = String::from_utf8(bytes).map_err(|_| wrong())?;
    checked_user(note, text.split_once(':').map_or(text.as_str(), |(name, _)| name))
}

/// The user `name`, or the usual one where it is empty.
fn checked_user(note: &Note, name: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    match name {
        "" => Ok(note.user.clone()),
        name if name.len() <= USER_BYTES_MAX && name.chars().all(plain) => Ok(name.to_owned()),
        _ => Err(Problem::unauthorized("this cannot be the name of a user")),
    }
}

/// Where `path` is for the guest: a relative one begins at the template's directory, if it has one.
fn placed(note: &Note, path: &str) -> String {
    match &note.workdir {
        Some(from) if !path.starts_with(['/', '~']) => {
            format!("{}/{path}", from.trim_end_matches('/'))
        }
        _ => path.to_owned(),
    }
}

/// A guest's refusal of a user, which is one of whoever asks.
fn of_user(problem: Problem) -> Problem {
    match problem.status == StatusCode::BAD_REQUEST && problem.message.starts_with("no user ") {
        true => Problem::unauthorized(problem.message),
        false => problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_the_name_of_the_authorization() {
        let note = Note { user: "user".to_owned(), ..Note::default() };
        let of = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert("authorization", value.parse().unwrap());
            }
            user(&note, &headers)
        };
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        assert_eq!(of(None).unwrap(), "user");
        assert_eq!(of(Some(&basic("root:"))).unwrap(), "root");
        assert_eq!(of(Some(&basic("root"))).unwrap(), "root");
        assert_eq!(of(Some(&basic(":"))).unwrap(), "user");
        let long = "x".repeat(10_000);
        for wrong in ["Basic !", "Bearer x", &basic("a\nb:"), &basic("a/b:"), &basic(&long)] {
            assert_eq!(of(Some(wrong)).unwrap_err().status, 401, "{wrong}");
        }
    }

    #[test]
    fn relative_paths_begin_where_the_template_says() {
        let mut note = Note::default();
        assert_eq!(placed(&note, "a"), "a");
        note.workdir = Some("/srv/".to_owned());
        assert_eq!(
            ["a", "", "/a", "~", "~/a"].map(|path| placed(&note, path)),
            ["/srv/a", "/srv/", "/a", "~", "~/a"]
        );
    }
}
