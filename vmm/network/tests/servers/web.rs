//! A server of hyper's, on a thread of its own.

use std::convert::Infallible;
use std::os::unix::net::UnixListener;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

/// Serves until the test's process ends.
pub fn serve(listener: UnixListener) {
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                let mut http = http1::Builder::new();
                http.half_close(true).pipeline_flush(true);
                let served = http.serve_connection(TokioIo::new(stream), service_fn(answer));
                tokio::spawn(served);
            }
        });
    });
}

async fn answer(mut request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    // A body that ends too soon is the test's affair.
    while let Some(Ok(_)) = request.body_mut().frame().await {}
    let host = request.headers().get("host").map(|host| host.as_bytes().to_vec());
    let host = request.uri().authority().map_or(host, |own| Some(own.as_str().as_bytes().to_vec()));
    let host = String::from_utf8_lossy(&host.unwrap_or_default()).into_owned();
    Ok(Response::new(Full::new(Bytes::from(format!("[[{host}]]\n")))))
}
