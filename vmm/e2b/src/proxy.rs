//! Other ports of a sandbox: HTTP is passed on to whoever listens there, by the operator's own way
//! in. The sandbox needs no right to the network for that.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::agent::client::{ClientError, cleaned};
use exocell_cell::agent::{Kind, Reply, Request as Wanted};
use exocell_docker::frames::{read_frame, write_json};
use exocell_door::Work;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HOST, HeaderName, HeaderValue, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncWriteExt, copy, split};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::{Problem, Result};
use crate::http::{Body, PAUSE_MAX, Response, json_reply, refusal};
use crate::sandbox::Sandbox;

/// How long a program may take to accept a connection: twice what the guest gives it, which has two
/// addresses.
const DIAL_MAX: Duration = Duration::from_secs(15);
/// How long it may take to begin its answer.
const ANSWER_MAX: Duration = Duration::from_secs(600);
/// How long a side of a tunnel goes on when the other has ended.
const LAST_MAX: Duration = Duration::from_secs(10);
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

/// Lets a visitor in, whose call counts as one of the sandbox' from now on.
///
/// # Errors
/// 403: it has not the token that it needs; 429: there are too many.
pub fn admit(sandbox: &Sandbox, request: &Request<Incoming>, work: &Work) -> Result<()> {
    let token = request.headers().get(TRAFFIC_TOKEN).and_then(|value| value.to_str().ok());
    if !sandbox.lets_through(token) {
        let problem = "this sandbox lets in whoever has its traffic access token \
                       (e2b-traffic-access-token)";
        return Err(Problem::new(StatusCode::FORBIDDEN, problem));
    }
    let (place, share) = sandbox.visit()?;
    work.keep(place);
    work.count(sandbox.tenant(), share);
    Ok(())
}

/// Passes `request` on to `port` of the sandbox.
pub async fn pass(
    sandbox: Arc<Sandbox>,
    port: u16,
    request: Request<Incoming>,
    work: &Arc<Work>,
) -> Response {
    let line = match dial(&sandbox, port).await {
        Ok(line) => line,
        Err(problem) if problem.status == StatusCode::NOT_FOUND => return shut(&sandbox.id, port),
        Err(problem) => return refusal(&problem),
    };
    let mask = sandbox.masked_host(port);
    exchange(line, request, mask, work).await.unwrap_or_else(|problem| refusal(&problem))
}

/// A connection to `port`. Who does not take it holds no thread.
async fn dial(sandbox: &Arc<Sandbox>, port: u16) -> Result<UnixStream> {
    let mut line = sandbox.visitors_line().await?;
    let asked = async {
        write_json(&mut line, Kind::Request, &Wanted::Dial { port }).await?;
        read_frame(&mut line).await
    };
    let late = |_| Problem::deadline("the program at this port did not take the connection");
    match timeout(DIAL_MAX, asked).await.map_err(late)? {
        Ok(Some(frame)) if frame.kind == Kind::Reply => match frame.json() {
            Ok(Reply::Done) => Ok(line),
            Ok(Reply::Failed { kind, message }) => {
                Err(ClientError::Failed { kind, message: cleaned(&message) }.into())
            }
            _ => Err(broken("the guest broke the protocol")),
        },
        _ => Err(Problem::unavailable("the sandbox ended meanwhile")),
    }
}

fn broken(error: impl std::fmt::Display) -> Problem {
    Problem::new(StatusCode::BAD_GATEWAY, format!("the program at this port broke off: {error}"))
}

async fn exchange(
    line: UnixStream,
    mut request: Request<Incoming>,
    mask: Option<HeaderValue>,
    work: &Arc<Work>,
) -> Result<Response> {
    // Names of headers as most clients write them: not all programs know that case is nothing.
    let mut how = hyper::client::conn::http1::Builder::new();
    let how = how.title_case_headers(true);
    let (mut sender, connection) = how.handshake(TokioIo::new(line)).await.map_err(broken)?;
    // It ends with this, wherever it is by then.
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        // Its end is told by the answer's.
        let _ = connection.with_upgrades().await;
    });
    let upgrades = request.headers().contains_key(UPGRADE);
    let ours = upgrades.then(|| hyper::upgrade::on(&mut request));
    let (mut head, body) = request.into_parts();
    for name in OWN {
        head.headers.remove(name);
    }
    if let Some(mask) = mask {
        head.headers.insert(HOST, mask);
    }
    if !upgrades {
        head.headers.remove(CONNECTION);
        head.headers.remove(HeaderName::from_static("keep-alive"));
    }
    // A program is asked for a path, whatever the form in which the client asked.
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    head.uri = path.parse().map_err(broken)?;
    head.version = hyper::Version::HTTP_11;
    let asked = sender.send_request(Request::from_parts(head, body));
    let late = |_| Problem::deadline("the program at this port did not answer in time");
    let mut answer = timeout(ANSWER_MAX, asked).await.map_err(late)?.map_err(broken)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(ours) = ours
    {
        let theirs = hyper::upgrade::on(&mut answer);
        let work = work.clone();
        tokio::spawn(async move {
            if let (Ok(ours), Ok(theirs)) = tokio::join!(ours, theirs) {
                tunnel(ours, theirs, &work).await;
            }
            drop(driver);
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
        let _driver = driver;
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

/// Passes bytes on, both ways, until a side has said its last or the client is gone; the other may
/// finish its sentence.
async fn tunnel(ours: Upgraded, theirs: Upgraded, work: &Work) {
    let (mut from_client, mut to_client) = split(TokioIo::new(ours));
    let (mut from_program, mut to_program) = split(TokioIo::new(theirs));
    // Either side may break off.
    let mut inwards = pin!(async {
        let _ = copy(&mut from_client, &mut to_program).await;
        let _ = to_program.shutdown().await;
    });
    let mut outwards = pin!(async {
        let _ = copy(&mut from_program, &mut to_client).await;
        let _ = to_client.shutdown().await;
    });
    tokio::select! {
        () = &mut inwards => drop(timeout(LAST_MAX, outwards).await),
        () = &mut outwards => drop(timeout(LAST_MAX, inwards).await),
        // It may have said much that the program does not read.
        () = work.gone() => {
            let both = async { tokio::join!(inwards, outwards) };
            drop(timeout(LAST_MAX, both).await);
        }
    }
}
