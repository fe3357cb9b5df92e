"""A Space on Hugging Face that plans 2-bit KV caches, shows a zoo, and takes requests.

python app.py        # on http://127.0.0.1:7860
"""

import uvicorn
from settings import forget_tokens, read_settings

if __name__ == "__main__":
    forget_tokens()
    from connections import PatientProtocol
    from pages import make_app

    settings = read_settings()
    uvicorn.run(
        make_app(settings), host=settings.host, port=settings.port, log_level="warning",
        server_header=False, http=PatientProtocol, ws="none",
    )  # fmt: skip
