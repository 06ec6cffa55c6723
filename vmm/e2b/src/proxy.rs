//! Other ports of a sandbox: HTTP is passed on to whoever listens there, by the operator's own way
//! in. The sandbox needs no right to the network for that.

use std::io;
use std::sync::Arc;

use exocell_cell::agent::client;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderName, UPGRADE};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::error::{Problem, Result};
use crate::http::{Body, PAUSE_MAX, Response, json_reply, refusal};
use crate::sandbox::Sandbox;

/// Headers that are the server's business, and no program's.
const OWN: [&str; 4] =
    ["x-access-token", "e2b-traffic-access-token", "e2b-sandbox-id", "e2b-sandbox-port"];
const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// What a client hears of a sandbox that there is not.
pub fn no_sandbox(id: &str) -> Response {
    let told = json!({ "sandboxId": id, "message": "The sandbox was not found", "code": 502 });
    json_reply(StatusCode::BAD_GATEWAY, &told)
}

fn shut(id: &str, port: u16) -> Response {
    let message = "The sandbox is running but port is not open";
    let told = json!({ "sandboxId": id, "message": message, "port": port, "code": 502 });
    json_reply(StatusCode::BAD_GATEWAY, &told)
}

/// Passes `request` on to `port` of the sandbox.
pub async fn pass(sandbox: Arc<Sandbox>, port: u16, request: Request<Incoming>) -> Response {
    let token = request.headers().get(TRAFFIC_TOKEN).and_then(|value| value.to_str().ok());
    if !sandbox.lets_through(token) {
        let problem = "this sandbox lets in whoever has its traffic access token \
                       (e2b-traffic-access-token)";
        return refusal(&Problem::new(StatusCode::FORBIDDEN, problem));
    }
    let line = sandbox.line(move |guest| Ok(client::dial(guest, guest, port)?)).await;
    let line = match line {
        Ok(line) => line,
        Err(problem) if problem.status == StatusCode::NOT_FOUND => return shut(&sandbox.id, port),
        Err(problem) => return refusal(&problem),
    };
    exchange(line, request).await.unwrap_or_else(|problem| refusal(&problem))
}

fn broken(error: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::BAD_GATEWAY, format!("the program at this port broke off: {error}"))
}

async fn exchange(line: UnixStream, mut request: Request<Incoming>) -> Result<Response> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(line)).await.map_err(broken)?;
    tokio::spawn(async move {
        // Its end is told by the answer's.
        let _ = connection.with_upgrades().await;
    });
    let upgrades = request.headers().contains_key(UPGRADE);
    let ours = upgrades.then(|| hyper::upgrade::on(&mut request));
    let (mut head, body) = request.into_parts();
    for name in OWN {
        head.headers.remove(name);
    }
    if !upgrades {
        head.headers.remove(CONNECTION);
        head.headers.remove(HeaderName::from_static("keep-alive"));
    }
    // A program is asked for a path, whatever the form in which the client asked.
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    head.uri = path.parse().map_err(broken)?;
    head.version = hyper::Version::HTTP_11;
    let mut answer = sender.send_request(Request::from_parts(head, body)).await.map_err(broken)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(ours) = ours
    {
        let theirs = hyper::upgrade::on(&mut answer);
        tokio::spawn(async move {
            if let (Ok(ours), Ok(theirs)) = tokio::join!(ours, theirs) {
                // Either side may break off.
                let (mut ours, mut theirs) = (TokioIo::new(ours), TokioIo::new(theirs));
                let _ = copy_bidirectional(&mut ours, &mut theirs).await;
            }
        });
        let (head, _) = answer.into_parts();
        return Ok(Response::from_parts(head, Body::empty()));
    }
    let (mut head, mut body) = answer.into_parts();
    head.headers.remove(CONNECTION);
    head.headers.remove(HeaderName::from_static("keep-alive"));
    head.headers.remove(hyper::header::TRANSFER_ENCODING);
    let (to, passed) = Body::stream();
    tokio::spawn(async move {
        loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = to.closed() => return,
            };
            match frame {
                None => return,
                Some(Err(error)) => return to.break_off(io::Error::other(error)).await,
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    // A client that does not read is not waited for for ever.
                    if !timeout(PAUSE_MAX, to.send(data)).await.unwrap_or(false) {
                        return;
                    }
                }
            }
        }
    });
    Ok(Response::from_parts(head, passed))
}
