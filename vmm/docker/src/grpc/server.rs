//! Answering calls.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use h2::server::SendResponse;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Response, StatusCode};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{
    CONNECTION_WINDOW_BYTES, Code, HEAD_BYTES_MAX, Messages, Result, STREAM_WINDOW_BYTES, Status,
    send,
};

/// Calls at once on one connection.
const CALLS_MAX: u32 = 256;
/// Calls that go on, those that the client gave up among them, before it is cut off.
const GIVEN_UP_MAX: usize = 4 * CALLS_MAX as usize;
/// The longest message of a client, in bytes: as gRPC has it.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// How long it may take to send it.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Messages of one connection that are read at once: one that is unfinished is kept.
const READ_MAX: usize = 8;

/// A call of a client.
pub struct Call {
    /// Service and method: `/grpc.health.v1.Health/Check`.
    pub path: String,
    pub head: HeaderMap,
    messages: Messages,
    reply: Reply,
    reads: Arc<Semaphore>,
}

impl Call {
    /// The only message of the client, which has its time in all, however its parts come.
    ///
    /// # Errors
    /// There is none, it cannot be read, or it is not there in time.
    pub async fn message<M: Message + Default>(&mut self) -> Result<M> {
        let _turn = self.reads.acquire().await;
        let late = |_| Status::new(Code::DeadlineExceeded, "the call's message did not come");
        let message = timeout(PAUSE_MAX, self.messages.next()).await.map_err(late)??;
        message.ok_or_else(|| Status::invalid("the call has no message"))
    }

    /// Both directions, of a call in which the client may say nothing for as long as it is there.
    pub fn endless(&mut self) -> (&mut Messages, &mut Reply) {
        self.messages.wait_for_ever();
        (&mut self.messages, &mut self.reply)
    }

    pub fn reply(&mut self) -> &mut Reply {
        &mut self.reply
    }
}

/// Where the answer goes.
pub struct Reply {
    respond: SendResponse<Bytes>,
    stream: Option<SendStream<Bytes>>,
}

impl Reply {
    /// Sends a message.
    ///
    /// # Errors
    /// The client is gone, or does not read.
    pub async fn send<M: Message>(&mut self, message: &M) -> Result<()> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            empty => {
                let begun = self.respond.send_response(head(HeaderMap::new()), false);
                empty.insert(begun.map_err(|error| Status::broken(&error))?)
            }
        };
        send(stream, message).await
    }

    /// Waits until the client wants no answer any more, or is gone.
    pub async fn gone(&mut self) {
        match &mut self.stream {
            // Whatever ended it: nobody listens.
            Some(stream) => drop(poll_fn(|cx| stream.poll_reset(cx)).await),
            None => drop(poll_fn(|cx| self.respond.poll_reset(cx)).await),
        }
    }

    fn end(self, outcome: &Result<()>) {
        let trailers = Status::trailers(outcome);
        // A client that is gone needs no end.
        match self.stream {
            Some(mut stream) => drop(stream.send_trailers(trailers)),
            None => {
                let mut respond = self.respond;
                drop(respond.send_response(head(trailers), true));
            }
        }
    }
}

fn head(more: HeaderMap) -> Response<()> {
    let mut response = Response::new(());
    *response.headers_mut() = more;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// Who answers calls.
pub trait Service: Send + Sync + 'static {
    /// Carries one out; its future is dropped when the connection is gone.
    fn call(&self, call: &mut Call) -> impl Future<Output = Result<()>> + Send;
}

/// Answers all calls that come by `io`, until the client is gone.
pub async fn serve<S: Service>(io: impl AsyncRead + AsyncWrite + Unpin, service: Arc<S>) {
    let mut how = h2::server::Builder::new();
    how.max_concurrent_streams(CALLS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let Ok(mut connection) = how.handshake::<_, Bytes>(io).await else { return };
    // With the connection its calls end.
    let mut calls = JoinSet::new();
    let reads = Arc::new(Semaphore::new(READ_MAX));
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        while calls.try_join_next().is_some() {}
        // Each that the client gave up takes a moment to end.
        if calls.len() > GIVEN_UP_MAX {
            return;
        }
        let is_grpc = request.headers().get(CONTENT_TYPE).is_some_and(|kind| {
            kind.as_bytes().starts_with(b"application/grpc") && request.method() == "POST"
        });
        if !is_grpc {
            let mut refused = Response::new(());
            *refused.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            drop(respond.send_response(refused, true));
            continue;
        }
        let (head, body) = request.into_parts();
        let (service, reads) = (service.clone(), reads.clone());
        calls.spawn(async move {
            let messages = Messages::new(body, MESSAGE_BYTES_MAX, PAUSE_MAX);
            let reply = Reply { respond, stream: None };
            let path = head.uri.path().to_owned();
            let mut call = Call { path, head: head.headers, messages, reply, reads };
            let outcome = service.call(&mut call).await;
            call.reply.end(&outcome);
        });
    }
}

/// What is said of a method that is not there.
pub fn unknown(path: &str) -> Status {
    Status::new(Code::Unimplemented, format!("there is no method {path} here"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::frames::framed;
    use hyper::Request;

    #[derive(Clone, PartialEq, Message)]
    struct Word {
        #[prost(string, tag = "1")]
        text: String,
    }

    struct Echo;

    impl Service for Echo {
        async fn call(&self, call: &mut Call) -> Result<()> {
            let word: Word = call.message().await?;
            call.reply().send(&word).await
        }
    }

    #[tokio::test]
    async fn so_many_unfinished_messages_are_kept_and_others_wait() {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        tokio::spawn(serve(theirs, Arc::new(Echo)));
        let (mut client, connection) = h2::client::handshake(ours).await.unwrap();
        tokio::spawn(connection);
        let mut held = Vec::new();
        for _ in 0..=READ_MAX {
            client = client.ready().await.unwrap();
            let request = Request::post("/x").header(CONTENT_TYPE, "application/grpc");
            held.push(client.send_request(request.body(()).unwrap(), false).unwrap());
        }
        let (answer, mut whole) = held.pop().unwrap();
        for (_, body) in &mut held {
            // The head of a message of nine bytes.
            body.send_data(Bytes::from_static(&[0, 0, 0, 0, 9]), false).unwrap();
        }
        whole.send_data(framed(&Word { text: "said".to_owned() }), true).unwrap();
        let mut answer = std::pin::pin!(answer);
        let early = timeout(Duration::from_millis(200), answer.as_mut()).await;
        assert!(early.is_err(), "it waits for a turn");
        let (_, mut given_up) = held.pop().unwrap();
        given_up.send_reset(h2::Reason::CANCEL);
        assert_eq!(answer.await.unwrap().status(), StatusCode::OK);
    }
}
