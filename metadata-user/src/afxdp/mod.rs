//! AF_XDP receive: UMEM, rings, socket.
