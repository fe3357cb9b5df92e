"""Is an artifact what it says it is (`verify`), of this model's weights (`membership`), and stored
by the CUDA kernel as the codec defines (`kernel`)?"""
