//! Answers: whole ones and streams, each with what a browser is to hold the page to.
//!
//! A stream is of server-sent events (HTML Living Standard, 9.2), each a line of JSON.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use exocell_door::Work;
use hyper::body::{Body, Bytes, Frame};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use hyper::{Response, StatusCode};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::error::Refusal;

pub type Reply = Response<Words>;

/// Nothing but the server's own files, no frame around the page, and no text that becomes a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    require-trusted-types-for 'script'; trusted-types 'none'";
/// Events on their way to a browser, and how long it may take to read one.
const WAITING_MAX: usize = 16;
const READING_MAX: Duration = Duration::from_secs(30);
/// How often a stream says that it is there.
pub const ALIVE_TIME: Duration = Duration::from_secs(15);

/// The body of an answer.
pub enum Words {
    Whole(Option<Bytes>),
    /// What comes, and the call that it answers.
    Stream(
        mpsc::Receiver<Bytes>,
        #[expect(dead_code, reason = "the call lasts as long")] Option<Arc<Work>>,
    ),
}

impl Words {
    /// The same; `work` lasts as long as it does.
    pub fn keeping(self, work: Arc<Work>) -> Self {
        match self {
            Self::Stream(more, _) => Self::Stream(more, Some(work)),
            whole => whole,
        }
    }
}

impl Body for Words {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Self::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(more, _) => {
                more.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }
}

/// What is said on a stream.
#[derive(Clone)]
pub struct Stream(mpsc::Sender<Bytes>);

impl Stream {
    /// A stream, and the reply that brings it to the browser.
    pub fn open() -> (Self, Reply) {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        (Self(sender), reply(StatusCode::OK, "text/event-stream", Words::Stream(receiver, None)))
    }

    /// Says something; false when nobody listens any more.
    pub async fn say(&self, what: &impl Serialize) -> bool {
        match serde_json::to_string(what) {
            Ok(text) => self.tell(&text).await,
            Err(_) => false,
        }
    }

    /// The same of what is JSON already.
    pub async fn tell(&self, json: &str) -> bool {
        self.send(format!("data: {json}\n\n")).await
    }

    /// Says that there is nothing new.
    pub async fn live(&self) -> bool {
        self.send(":\n\n".to_owned()).await
    }

    async fn send(&self, text: String) -> bool {
        timeout(READING_MAX, self.0.send(text.into())).await.is_ok_and(|sent| sent.is_ok())
    }

    /// Says something from a thread; false when nobody listens any more.
    pub fn say_blocking(&self, what: &impl Serialize) -> bool {
        let Ok(text) = serde_json::to_string(what) else { return false };
        self.0.blocking_send(format!("data: {text}\n\n").into()).is_ok()
    }

    /// Until nobody listens.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// An answer of this type.
pub fn reply(status: StatusCode, kind: &'static str, body: Words) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    let own = HeaderValue::from_static;
    let headers = reply.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, own(value));
    }
    reply
}

pub fn text(kind: &'static str, text: &'static str) -> Reply {
    reply(StatusCode::OK, kind, Words::Whole(Some(Bytes::from_static(text.as_bytes()))))
}

pub fn done() -> Reply {
    reply(StatusCode::NO_CONTENT, "text/plain", Words::Whole(None))
}

pub fn refused(refusal: &Refusal) -> Reply {
    let told = serde_json::json!({ "message": refusal.message }).to_string();
    reply(refusal.status, "application/json", Words::Whole(Some(told.into())))
}
