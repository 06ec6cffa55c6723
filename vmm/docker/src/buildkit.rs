//! Building by BuildKit's protocol: `POST /session` and `POST /grpc`, as `docker build` with buildx
//! and compose have it.
//!
//! ```text
//! client ── POST /grpc ─────> [`control`]: Solve, Status, LLBBridge.Solve, ...
//!        ── POST /session ──> [`crate::session`]: it is asked for files, secrets, credentials
//!
//! Solve ──> [`jobs`] ──> [`attributes`] ──> [`contexts`] ──> [`work`]: crate::build ──> [`outputs`]
//!                └─────> [`crate::progress`] ──> Status
//! ```
//! Images are built by the project's own executor of Dockerfiles, as `POST /build` does it. Steps in
//! BuildKit's own form (LLB) and other frontends are refused.

mod attributes;
mod contexts;
mod control;
mod jobs;
mod lines;
mod outputs;
mod work;

use std::sync::Arc;

use hyper::StatusCode;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::{ApiError, ApiResult};
use crate::grpc::client::Channel;
use crate::grpc::{said, server as answering};
use crate::http::{Call, Response, empty};
use crate::session::{Named, Session};
use crate::state::Server;

/// What is spoken on a connection that is taken over: HTTP/2 without TLS.
const H2C: &str = "h2c";

/// Has the connection speak HTTP/2.
fn taken_over(call: &mut Call) -> ApiResult<(Response, OnUpgrade)> {
    let wanted = said(&call.headers, "upgrade").unwrap_or_default();
    let upgrade = call.upgrade.take().filter(|_| wanted.eq_ignore_ascii_case(H2C));
    let upgrade = upgrade.ok_or_else(|| {
        ApiError::bad_request(format!("this call takes its connection over (Upgrade: {H2C})"))
    })?;
    let mut response = empty(StatusCode::SWITCHING_PROTOCOLS);
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(H2C));
    Ok((response, upgrade))
}

/// `POST /session`: the client answers on this connection.
pub fn session(server: &Arc<Server>, mut call: Call) -> ApiResult<Response> {
    let named = Named::of(&call.headers).map_err(ApiError::bad_request)?;
    let (response, upgrade) = taken_over(&mut call)?;
    let (server, place) = (server.clone(), call.place.clone());
    tokio::spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        answers(&server, named, TokioIo::new(upgraded)).await;
        drop(place);
    });
    Ok(response)
}

/// `POST /grpc`: the client asks on this connection.
pub fn grpc(server: &Arc<Server>, mut call: Call) -> ApiResult<Response> {
    let (response, upgrade) = taken_over(&mut call)?;
    let (server, place) = (server.clone(), call.place.clone());
    tokio::spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        let control = control::Control::new(server);
        answering::serve(TokioIo::new(upgraded), Arc::new(control)).await;
        drop(place);
    });
    Ok(response)
}

/// Has the client answer on `io` until it is gone.
async fn answers(
    server: &Arc<Server>,
    named: Named,
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) {
    // One that does not speak HTTP/2 is none.
    let Ok((channel, run)) = Channel::begin(io).await else { return };
    if let Some(_listed) = server.sessions.add(Session::new(named, channel)) {
        run.await;
    }
}
