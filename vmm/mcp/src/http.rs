//! Streamable HTTP at `/mcp`, for whoever has the key. Requests of a page that a browser shows are
//! refused by their Host and Origin.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::key::Key;
use exocell_door::{Door, Seat, Work};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::transport::streamable_http_server::session::SessionManager;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;

use crate::tools::Tools;

/// Connections at once; for who comes then another goes ([`exocell_door`]).
const CONNECTIONS_MAX: usize = 256;
const HEAD_TIME_MAX: Duration = Duration::from_secs(10);
const HEAD_BYTES_MAX: usize = 64 << 10;
/// The longest request: a file of 4 MiB in base64, and a little.
const BODY_BYTES_MAX: usize = 8 << 20;
const PATH: &str = "/mcp";
/// Sessions at once, of clients that speak a version of the protocol that has them. The crate ends
/// those of which nobody hears any more.
const SESSIONS_MAX: usize = 256;
const SESSION: &str = "mcp-session-id";

type Service = StreamableHttpService<Tools, LocalSessionManager>;
type Served = (Service, Arc<LocalSessionManager>);
type Reply = Response<BoxBody<Bytes, Infallible>>;

/// Serves clients for ever.
pub async fn serve(listener: TcpListener, tools: Tools, key: Key) {
    let own = listener.local_addr().map(|at| at.to_string()).unwrap_or_default();
    let config = StreamableHttpServerConfig::default()
        .with_allowed_hosts(["localhost", "127.0.0.1", "::1", own.as_str()])
        .enforce_origin_validation()
        .with_max_request_body_bytes(BODY_BYTES_MAX);
    let sessions = Arc::<LocalSessionManager>::default();
    let service = Service::new(move || Ok(tools.clone()), sessions.clone(), config);
    let door = Door::new(CONNECTIONS_MAX);
    loop {
        let (seat, line) = door.next(&listener).await;
        tokio::spawn(converse((service.clone(), sessions.clone()), key, seat, line));
    }
}

async fn converse(
    served: Served,
    key: Key,
    seat: Arc<Seat>,
    line: impl AsyncRead + AsyncWrite + Unpin + Send,
) {
    let own = seat.clone();
    let answer = service_fn(move |request: Request<Incoming>| {
        let (served, work) = (served.clone(), Work::new(&own));
        async move {
            let reply = answer(&served, key, request, &work).await;
            // Of whoever has the key the connection stays until all of the answer is said.
            let kept = |body: BoxBody<Bytes, Infallible>| {
                body.map_frame(move |frame| {
                    let _ = &work;
                    frame
                })
                .boxed()
            };
            Ok::<_, Infallible>(reply.map(kept))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(line), answer);
    tokio::select! {
        // What a client broke off is its own affair.
        _ = connection => {}
        () = seat.told_to_go() => {}
    }
}

async fn answer(
    (service, sessions): &Served,
    key: Key,
    request: Request<Incoming>,
    work: &Work,
) -> Reply {
    let given = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer "));
    if !given.is_some_and(|given| key.is(given.trim())) {
        let mut reply = refuse(StatusCode::UNAUTHORIZED, "say Authorization: Bearer KEY\n");
        let bearer = hyper::header::HeaderValue::from_static("Bearer");
        reply.headers_mut().insert(WWW_AUTHENTICATE, bearer);
        return reply;
    }
    work.count("", ());
    if request.uri().path().trim_end_matches('/') != PATH {
        return refuse(StatusCode::NOT_FOUND, "the protocol is spoken at /mcp\n");
    }
    let has_one = request.headers().contains_key(SESSION);
    let reply = service.handle(request).await;
    let begun = reply.headers().get(SESSION).filter(|_| !has_one);
    let Some(id) = begun.and_then(|id| id.to_str().ok()) else { return reply };
    if sessions.sessions.read().await.len() <= SESSIONS_MAX {
        return reply;
    }
    // It is there still, or has ended by itself.
    let _ = sessions.close_session(&id.into()).await;
    refuse(StatusCode::TOO_MANY_REQUESTS, "there are as many sessions as may be; end one\n")
}

fn refuse(status: StatusCode, why: &'static str) -> Reply {
    let mut reply = Response::new(Full::new(Bytes::from_static(why.as_bytes())).boxed());
    *reply.status_mut() = status;
    reply
}
