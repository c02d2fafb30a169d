//! HTTP/1.0 and 1.1 as a metadata service needs it (RFC 9110, RFC 9112).

pub mod body;
pub mod date;
pub mod host;
mod message;
pub mod parse;
mod response;
pub mod target;

pub use message::RequestError;
pub use message::{Headers, Method, Request, RequestTarget};
pub(crate) use response::ResponseHead;
pub use response::{Body, Response, StatusCode};
