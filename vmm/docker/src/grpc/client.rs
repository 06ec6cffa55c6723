//! Making calls.

use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, TE};
use hyper::{HeaderMap, Request, StatusCode};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::timeout;

use super::{
    CONNECTION_WINDOW_BYTES, Code, HEAD_BYTES_MAX, Messages, Result, STREAM_WINDOW_BYTES, Status,
    send,
};

/// How long the other side may take to answer at all.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// The same for a stream, where a person may have to be asked first.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// Who is spoken to; there is one at the other end.
const AUTHORITY: &str = "http://localhost";

/// The other end of a connection that answers calls.
#[derive(Clone)]
pub struct Channel {
    requests: SendRequest<Bytes>,
    gone: watch::Receiver<bool>,
}

impl Channel {
    /// Speaks to the other end of `io`. The connection ends with the returned future, which is to
    /// be waited for.
    ///
    /// # Errors
    /// It does not speak HTTP/2.
    pub async fn begin(
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<(Self, impl Future<Output = ()> + Send)> {
        let mut how = h2::client::Builder::new();
        how.enable_push(false)
            .max_header_list_size(HEAD_BYTES_MAX)
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
        let begun = timeout(ANSWER_MAX, how.handshake::<_, Bytes>(io)).await;
        let begun = begun.map_err(|_| late("a session"))?;
        let (requests, connection) = begun.map_err(|error| Status::broken(&error))?;
        let (tell, gone) = watch::channel(false);
        let run = async move {
            // How it ended is each call's to say.
            drop(connection.await);
            tell.send_replace(true);
        };
        Ok((Self { requests, gone }, run))
    }

    /// Waits until the connection is gone.
    pub async fn gone(&self) {
        let mut gone = self.gone.clone();
        // Whoever would have told is gone as well.
        drop(gone.wait_for(|gone| *gone).await);
    }

    /// Begins a call of `path`, service and method, with more in its head. Messages of the answer
    /// have at most `bytes_max`.
    ///
    /// # Errors
    /// The other side is gone, or takes no more calls.
    pub async fn open(
        &self,
        path: &str,
        more: &[(&'static str, String)],
        bytes_max: usize,
    ) -> Result<Exchange> {
        let ready = timeout(ANSWER_MAX, self.requests.clone().ready()).await;
        let ready = ready.map_err(|_| late(path))?;
        let mut requests = ready.map_err(|error| Status::broken(&error))?;
        let mut request =
            Request::post(format!("{AUTHORITY}{path}")).body(()).map_err(unsendable)?;
        *request.version_mut() = hyper::Version::HTTP_2;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        for (name, value) in more {
            let value = HeaderValue::from_str(value).map_err(unsendable)?;
            headers.append(HeaderName::from_static(name), value);
        }
        let sent = requests.send_request(request, false);
        let (answer, stream) = sent.map_err(|error| Status::broken(&error))?;
        Ok(Exchange { stream, answer: Answer::Awaited(answer), bytes_max })
    }

    /// A call of one message that is answered by one.
    ///
    /// # Errors
    /// The other side's, or it does not answer.
    pub async fn ask<Q: Message, A: Message + Default>(
        &self,
        path: &str,
        message: &Q,
        bytes_max: usize,
    ) -> Result<A> {
        let answered = async {
            let mut exchange = self.open(path, &[], bytes_max).await?;
            exchange.send(message).await?;
            exchange.close_sending();
            let answer = exchange.next().await?;
            answer.ok_or_else(|| Status::new(Code::Internal, format!("{path} said nothing")))
        };
        timeout(ANSWER_MAX, answered).await.unwrap_or_else(|_| Err(late(path)))
    }
}

fn late(what: &str) -> Status {
    Status::new(Code::DeadlineExceeded, format!("the client does not answer ({what})"))
}

fn unsendable(error: impl std::fmt::Display) -> Status {
    Status::invalid(format!("a call cannot be sent: {error}"))
}

/// A call that is going on. What is left of it is broken off when it is dropped.
pub struct Exchange {
    stream: SendStream<Bytes>,
    answer: Answer,
    bytes_max: usize,
}

enum Answer {
    Awaited(ResponseFuture),
    Comes(Messages),
    /// How it ended was said.
    Ended,
}

impl Exchange {
    /// Sends a message.
    ///
    /// # Errors
    /// The other side is gone, or reads nothing.
    pub async fn send<M: Message>(&mut self, message: &M) -> Result<()> {
        send(&mut self.stream, message).await
    }

    /// Nothing more is sent.
    pub fn close_sending(&mut self) {
        drop(self.stream.send_data(Bytes::new(), true));
    }

    /// The next message of the answer; `None` once that has ended well.
    ///
    /// # Errors
    /// How the call failed.
    pub async fn next<M: Message + Default>(&mut self) -> Result<Option<M>> {
        loop {
            match &mut self.answer {
                Answer::Ended => return Ok(None),
                Answer::Awaited(answer) => {
                    let answer = timeout(PAUSE_MAX, answer).await.map_err(|_| late("a stream"))?;
                    let answer = answer.map_err(|error| Status::broken(&error))?;
                    let (head, body) = answer.into_parts();
                    if head.status != StatusCode::OK {
                        let words = format!("the client answers with {}", head.status);
                        return Err(Status::new(Code::Unknown, words));
                    }
                    if head.headers.contains_key("grpc-status") {
                        self.answer = Answer::Ended;
                        outcome(&head.headers)?;
                        continue;
                    }
                    self.answer = Answer::Comes(Messages::new(body, self.bytes_max, PAUSE_MAX));
                }
                Answer::Comes(messages) => match messages.next().await? {
                    Some(message) => return Ok(Some(message)),
                    None => {
                        let ended = messages.end().await;
                        self.answer = Answer::Ended;
                        ended?;
                    }
                },
            }
        }
    }
}

fn outcome(trailers: &HeaderMap) -> Result<()> {
    Status::of_trailers(trailers).map_or(Ok(()), Err)
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !matches!(self.answer, Answer::Ended) {
            self.stream.send_reset(Reason::CANCEL);
        }
    }
}
